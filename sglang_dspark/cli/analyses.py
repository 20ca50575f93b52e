"""`dspark eval NAME`: the paper's analyses of drafters, each with a result file and a figure."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sglang_dspark.cli import _traces, evaluate
from sglang_dspark.cli._analysis import (
    finish,
    open_session,
    read_vocabulary,
    redrafted,
    show_tau,
    table_of,
    with_confidence,
)
from sglang_dspark.cli._workload import (
    TOP_K_ALL,
    BatchOption,
    DraftersOption,
    JsonOption,
    LimitOption,
    MinPOption,
    PromptsOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    TokensOption,
    TopKOption,
    TopPOption,
)
from sglang_dspark.errors import DSparkError

if TYPE_CHECKING:
    from sglang_dspark.schedule.calibration import Calibration
    from sglang_dspark.schedule.sts_file import StsTable

app = typer.Typer(
    help="Judge drafters with the reference engine. Without a command: acceptance of one drafter.",
    context_settings={"help_option_names": ["--help"]},
)
app.callback(invoke_without_command=True)(evaluate.evaluate)
app.command("traces")(_traces.traces)

NoteOption = Annotated[
    str | None,
    typer.Option(help="Said in the figure's title, such as how long the drafters were trained."),
]
StsOption = Annotated[
    Path | None,
    typer.Option(help="Calibration table. Default: sts.json in the drafter's directory, if any."),
]
TraceOption = Annotated[
    Path, typer.Option(help="Trace file to write; of several drafters a folder, LABEL.json.")
]
AnswersOption = Annotated[
    Path | None,
    typer.Option(
        help="Trace of another drafter at this temperature: its answers are the target's own, so "
        "only the drafting is done again, to the same end (greedy) or law (sampled)."
    ),
]
TransitionOption = Annotated[
    bool, typer.Option(help="With --answers: draft with DSpark's transition bias, or without it.")
]


@app.command()
def record(
    drafter: DraftersOption,
    out: TraceOption,
    target: TargetOption = "demo",
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 96,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = TOP_K_ALL,
    min_p: MinPOption = 0.0,
    batch: BatchOption = 8,
    seed: SeedOption = 0,
    answers: AnswersOption = None,
    transition: TransitionOption = True,
) -> None:
    """Decode all prompts once and keep the trace, which the other commands take as a drafter."""
    from sglang_dspark.evaluation.traces import write_trace

    if not transition and answers is None:
        raise DSparkError(
            "--no-transition needs --answers: a trace whose answers are drafted again"
        )
    decoded = (drafter, target, prompts, limit, max_new_tokens, temperature, batch, seed)
    session = open_session(*decoded, top_k=top_k, top_p=top_p, min_p=min_p)
    if answers is None:
        traces = session.traces()
    else:
        labels = [each.label for each in session.drafters]
        traces = dict(zip(labels, redrafted(session, answers, transition), strict=True))
    for label, trace in traces.items():
        path = out if len(traces) == 1 else out / f"{label}.json"
        write_trace(path, trace)
        session.console.print(f"written to {path}", highlight=False, soft_wrap=True)


@app.command()
def tau(
    drafter: DraftersOption,
    target: TargetOption = "demo",
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 96,
    temperature: TemperatureOption = 0.0,
    batch: BatchOption = 8,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Table 1: tau by domain for several drafters, and the first one's ratio to the others."""
    from sglang_dspark.evaluation.analyses import tau_table

    session = open_session(
        drafter, target, prompts, limit, max_new_tokens, temperature, batch, seed
    )
    metrics = tau_table(session.traces())
    show_tau(session.console, metrics)
    finish(metrics, json_file, session.console)


@app.command()
def positions(
    drafter: DraftersOption,
    target: TargetOption = "demo",
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 96,
    temperature: TemperatureOption = 0.0,
    batch: BatchOption = 8,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """Fig. 2: chance that draft k is accepted, given the drafts before it."""
    from sglang_dspark.evaluation import analyses

    session = open_session(
        drafter, target, prompts, limit, max_new_tokens, temperature, batch, seed
    )
    finish(analyses.positions(session.traces()), json_file, session.console)


@app.command()
def depth(
    drafter: DraftersOption,
    target: TargetOption = "demo",
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 96,
    temperature: TemperatureOption = 0.0,
    batch: BatchOption = 8,
    seed: SeedOption = 0,
    note: NoteOption = None,
    json_file: JsonOption = None,
) -> None:
    """Fig. 3: tau by number of drafter layers; drafters of one label form one line."""
    from sglang_dspark.evaluation import analyses

    session = open_session(
        drafter, target, prompts, limit, max_new_tokens, temperature, batch, seed
    )
    finish(analyses.depth(session.series(), note), json_file, session.console)


@app.command()
def length(
    drafter: DraftersOption,
    target: TargetOption = "demo",
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 96,
    temperature: TemperatureOption = 0.0,
    batch: BatchOption = 8,
    seed: SeedOption = 0,
    note: NoteOption = None,
    json_file: JsonOption = None,
) -> None:
    """Fig. 4a: tau by proposal length gamma; label drafters by their head to compare heads."""
    from sglang_dspark.evaluation import analyses

    session = open_session(
        drafter, target, prompts, limit, max_new_tokens, temperature, batch, seed
    )
    finish(analyses.length(session.series(), note), json_file, session.console)


@app.command()
def thresholds(
    drafter: DraftersOption,
    target: TargetOption = "demo",
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 96,
    temperature: TemperatureOption = 0.0,
    batch: BatchOption = 8,
    seed: SeedOption = 0,
    rule: Annotated[
        Literal["survival", "conditional"],
        typer.Option(help="Admit draft k while its survival a_k, or its c_k, exceeds t."),
    ] = "survival",
    sts: StsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Fig. 5: acceptance rate and tau when drafts are admitted above a threshold."""
    from sglang_dspark.evaluation import analyses

    session = open_session(
        drafter, target, prompts, limit, max_new_tokens, temperature, batch, seed
    )
    usable = with_confidence(session)
    tables = {}
    for argument in session.drafters:
        table = (
            table_of(argument, usable[argument.label], sts) if argument.label in usable else None
        )
        if table is not None:
            tables[argument.label] = table.table(usable[argument.label].temperature).plain
    metrics = analyses.thresholds(usable, calibrations=tables, rule=rule)
    finish(metrics, json_file, session.console)


@app.command()
def reliability(
    drafter: DraftersOption,
    target: TargetOption = "demo",
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 96,
    temperature: TemperatureOption = 0.0,
    batch: BatchOption = 8,
    seed: SeedOption = 0,
    sts: StsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Fig. 6: predicted survival against acceptance before and after STS, on prompts that the
    table was not fitted on."""
    from sglang_dspark.cli._calibration_view import show_reliability
    from sglang_dspark.evaluation import reliability as numbers
    from sglang_dspark.evaluation.calibration_data import held_out

    if len(drafter) != 1:
        raise DSparkError("reliability is shown of one drafter: give --drafter once")
    session = open_session(
        drafter, target, prompts, limit, max_new_tokens, temperature, batch, seed
    )
    ((label, trace),) = with_confidence(session).items()
    table = table_of(session.drafters[0], trace, sts)
    if table is not None:
        keep = held_out(trace.prompts, table.fit_prompts)
        if not keep:
            raise DSparkError("the table was fitted on all of these prompts: give others")
        trace = trace.of_prompts(keep)
    variants = {} if table is None else _variants(table.table(trace.temperature))
    parts = numbers.reliability(trace, variants)
    show_reliability(session.console, f"{label}: {len(trace.prompts)} held-out prompts", parts)
    shown = {name: asdict(each) for name, each in variants.items()}
    metrics = numbers.as_metrics(label, trace, parts, calibrations=shown)
    finish(metrics, json_file, session.console)


def _variants(table: StsTable) -> dict[str, Calibration]:
    """The steps of a table, each of which is shown: temperatures, shifts, requests followed."""
    variants = {"after": table.plain, "shifted": table.shifted}
    if table.request_spread > 0:
        variants["followed"] = table.followed
    return variants


@app.command()
def overhead(
    drafter: DraftersOption,
    target: TargetOption = "demo",
    prompts: PromptsOption = None,
    max_new_tokens: TokensOption = 64,
    batch: BatchOption = 8,
    context: Annotated[int, typer.Option(min=1, help="Context tokens of the direct timing.")] = 256,
    repeats: Annotated[
        int, typer.Option(min=30, help="Pairs of rounds timed directly; fewer bound nothing.")
    ] = 60,
    json_file: JsonOption = None,
) -> None:
    """Fig. 4b: share of a round that the sequential loop takes, in the engine and by itself."""
    import torch

    from sglang_dspark.evaluation.overhead import measure

    session = open_session(drafter, target, prompts, batch, max_new_tokens, 0.0, batch, 0)
    work = session.workload()
    rows = []
    for argument in session.drafters:
        session.console.print(f"timing {argument.label} ({argument.path.name})", style="dim")
        timed = measure(work, argument.path, context=context, repeats=repeats)
        rows.append({"label": argument.label, **timed})
        share = timed["engine"]["wall"]["share"], timed["direct"]["thread_cpu"]["share"]
        session.console.print(
            f"{argument.label}: {share[0]:.2%} of a round in the engine (wall), {share[1]:.2%} "
            "timed directly (thread CPU)",
            highlight=False,
        )
    settings = {"temperature": 0.0, "batch": batch, "context": context}
    settings["threads"] = torch.get_num_threads()
    metrics = {"analysis": "overhead", "target": work.target.name, "settings": settings}
    finish({**metrics, "drafters": rows}, json_file, session.console)


@app.command()
def roc(
    drafter: DraftersOption,
    target: TargetOption = "demo",
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 96,
    temperature: TemperatureOption = 0.0,
    batch: BatchOption = 8,
    seed: SeedOption = 0,
    json_file: JsonOption = None,
) -> None:
    """ROC of confidence for acceptance; the area is shown with Fig. 6."""
    from sglang_dspark.evaluation import roc as numbers

    session = open_session(
        drafter, target, prompts, limit, max_new_tokens, temperature, batch, seed
    )
    finish(numbers.roc(with_confidence(session)), json_file, session.console)


@app.command()
def limits(
    drafter: DraftersOption,
    vocabulary: Annotated[
        Path, typer.Option(help="vocabulary.json of the drafters' training runs.")
    ],
    target: TargetOption = "demo",
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 96,
    batch: BatchOption = 8,
    json_file: JsonOption = None,
) -> None:
    """What ends drafts: tokens outside the vocabulary; and drafters at the same anchors, greedy."""
    from sglang_dspark.evaluation import limits as numbers

    session = open_session(drafter, target, prompts, limit, max_new_tokens, 0.0, batch, 0)
    known = read_vocabulary(vocabulary)
    finish(numbers.limits(session.traces(), known), json_file, session.console)


@app.command()
def curves(
    run: Annotated[
        list[str], typer.Option(help="LABEL=DIR of a run of `dspark train drafter`; repeat.")
    ],
    json_file: JsonOption = None,
) -> None:
    """Learning curves of training runs: tau on held-out answers, teacher forced."""
    from rich.console import Console

    from sglang_dspark.evaluation.curves import learning_curves

    named = [each.partition("=") for each in run]
    bad = [label for label, separator, _ in named if not separator]
    if bad:
        raise DSparkError(f"--run takes LABEL=DIR, found {bad[0]}")
    finish(learning_curves([(label, Path(d)) for label, _, d in named]), json_file, Console())
