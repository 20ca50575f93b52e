"""`dspark eval NAME`: run the paper's analyses of drafters, each with a result file and figure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from sglang_dspark.cli import _accept_rules, _traces, evaluate
from sglang_dspark.cli._analysis import (
    finish,
    open_session,
    read_vocabulary,
    redrafted,
    table_of,
    with_confidence,
)
from sglang_dspark.cli._workload import (
    SAMPLING,
    DraftersOption,
    JsonOption,
    WorkloadOptions,
    takes_workload,
)
from sglang_dspark.errors import DSparkError

app = typer.Typer(
    help="Judge drafters with the reference engine. Without a command: acceptance of one drafter.",
    context_settings={"help_option_names": ["--help"]},
)
app.callback(invoke_without_command=True)(evaluate.evaluate)
app.command("traces")(_traces.traces)
app.command("rules")(_accept_rules.rules)

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
        "only the drafting is done again, to the same end (greedy) or distribution (sampled)."
    ),
]
TransitionOption = Annotated[
    bool, typer.Option(help="With --answers: draft with DSpark's transition bias, or without it.")
]


@app.command()
@takes_workload(without=())
def record(
    drafter: DraftersOption,
    out: TraceOption,
    options: WorkloadOptions,
    answers: AnswersOption = None,
    transition: TransitionOption = True,
) -> None:
    """Decode all prompts once and save the trace, which the other commands accept as a drafter."""
    from sglang_dspark.evaluation.traces import write_trace

    if not transition and answers is None:
        raise DSparkError(
            "--no-transition needs --answers: a trace whose answers are drafted again"
        )
    session = open_session(drafter, options)
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
@takes_workload()
def tau(drafter: DraftersOption, options: WorkloadOptions, json_file: JsonOption = None) -> None:
    """Compare tau of drafters by domain, and the first one's ratio to the others (Table 1)."""
    from sglang_dspark.evaluation.analyses.tau import compute

    session = open_session(drafter, options)
    finish(compute(session.traces()), json_file, session.console)


@app.command()
@takes_workload()
def trainings(
    drafter: DraftersOption, options: WorkloadOptions, json_file: JsonOption = None
) -> None:
    """Compare tau of recipes trained several times; repeat a LABEL for each of its trainings."""
    from sglang_dspark.evaluation.analyses.trainings import compute

    session = open_session(drafter, options)
    finish(compute(session.series()), json_file, session.console)


@app.command()
@takes_workload()
def positions(
    drafter: DraftersOption, options: WorkloadOptions, json_file: JsonOption = None
) -> None:
    """Show the chance that draft k is accepted, given the drafts before it (Fig. 2)."""
    from sglang_dspark.evaluation.analyses.positions import compute

    session = open_session(drafter, options)
    finish(compute(session.traces()), json_file, session.console)


@app.command()
@takes_workload()
def depth(
    drafter: DraftersOption,
    options: WorkloadOptions,
    note: NoteOption = None,
    json_file: JsonOption = None,
) -> None:
    """Show tau by number of drafter layers; drafters of one label form one line (Fig. 3)."""
    from sglang_dspark.evaluation.analyses.series import DepthResult, compute

    session = open_session(drafter, options)
    finish(compute(DepthResult, session.series(), note), json_file, session.console)


@app.command()
@takes_workload()
def length(
    drafter: DraftersOption,
    options: WorkloadOptions,
    note: NoteOption = None,
    json_file: JsonOption = None,
) -> None:
    """Show tau by proposal length gamma; label drafters by head to compare heads (Fig. 4a)."""
    from sglang_dspark.evaluation.analyses.series import LengthResult, compute

    session = open_session(drafter, options)
    finish(compute(LengthResult, session.series(), note), json_file, session.console)


@app.command()
@takes_workload()
def thresholds(
    drafter: DraftersOption,
    options: WorkloadOptions,
    rule: Annotated[
        Literal["survival", "conditional"],
        typer.Option(help="Admit draft k while its survival a_k, or its c_k, exceeds t."),
    ] = "survival",
    sts: StsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Show acceptance rate and tau when drafts are admitted above a threshold (Fig. 5)."""
    from sglang_dspark.evaluation.analyses.thresholds import compute

    session = open_session(drafter, options)
    usable = with_confidence(session)
    tables = {}
    for argument in session.drafters:
        trace = usable.get(argument.label)
        table = None if trace is None else table_of(argument, trace, sts)
        if trace is not None and table is not None:
            tables[argument.label] = table.table(trace.temperature).plain
    finish(compute(usable, calibrations=tables, rule=rule), json_file, session.console)


@app.command()
@takes_workload()
def reliability(
    drafter: DraftersOption,
    options: WorkloadOptions,
    sts: StsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Compare predicted survival with acceptance, before and after STS (Fig. 6).

    Only prompts that the table was not fitted on are used.
    """
    from sglang_dspark.evaluation.analyses.reliability import compute

    if len(drafter) != 1:
        raise DSparkError("reliability is shown of one drafter: give --drafter once")
    session = open_session(drafter, options)
    ((label, trace),) = with_confidence(session).items()
    table = table_of(session.drafters[0], trace, sts)
    finish(compute(label, trace, table), json_file, session.console)


@app.command()
@takes_workload()
def traffic(
    drafter: DraftersOption,
    step_times: Annotated[
        Path,
        typer.Option(help="Step times that a server measured: costs/*.json in its cache folder."),
    ],
    options: WorkloadOptions,
    domains: Annotated[
        tuple[str, str], typer.Option(help="Domain of the requests, first and afterwards.")
    ] = ("math", "chat"),
    sts: StsOption = None,
    json_file: JsonOption = None,
) -> None:
    """Show confidence when traffic changes from one domain to another, --batch requests at a time.

    The table is as fitted (without any: the head's own), learned online, or with each request's
    own shift.
    """
    from sglang_dspark.common.files import load_json, reading
    from sglang_dspark.evaluation.analyses.traffic import compute, no_table
    from sglang_dspark.schedule.cost_table import from_document

    if len(drafter) != 1:
        raise DSparkError("traffic is shown of one drafter: give --drafter once")
    with reading(step_times, "table of step times", "name a file of a server's cache"):
        costs = from_document(load_json(step_times))
    session = open_session(drafter, options)
    ((label, trace),) = with_confidence(session).items()
    file = table_of(session.drafters[0], trace, sts)
    table = no_table(trace.gamma) if file is None else file.table(trace.temperature)
    finish(compute(label, trace, table, costs, domains, options.batch), json_file, session.console)


@app.command()
@takes_workload(without=("limit", "temperature", "seed", *SAMPLING), max_new_tokens=64)
def overhead(
    drafter: DraftersOption,
    options: WorkloadOptions,
    context: Annotated[
        list[int] | None,
        typer.Option(
            min=1, help="Context tokens of a direct timing; may be repeated. Default: 256."
        ),
    ] = None,
    repeats: Annotated[
        int, typer.Option(min=30, help="Pairs of rounds timed directly; fewer bound nothing.")
    ] = 60,
    json_file: JsonOption = None,
) -> None:
    """Measure the sequential loop's share of a round, in the engine and by itself (Fig. 4d)."""
    from sglang_dspark.evaluation.analyses.overhead import compute

    session = open_session(drafter, replace(options, limit=options.batch))
    named = {each.label: each.path for each in session.drafters}

    def says(label: str) -> None:
        session.console.print(f"timing {label} ({named[label].name})", style="dim")

    timed = compute(
        session.workload(), named, contexts=context or [256], repeats=repeats, on_start=says
    )
    finish(timed, json_file, session.console)


@app.command()
@takes_workload()
def roc(drafter: DraftersOption, options: WorkloadOptions, json_file: JsonOption = None) -> None:
    """Draw the ROC of confidence for acceptance; the area is shown with Fig. 6."""
    from sglang_dspark.evaluation.analyses.roc import compute

    session = open_session(drafter, options)
    finish(compute(with_confidence(session)), json_file, session.console)


@app.command()
@takes_workload(without=("temperature", "seed", *SAMPLING))
def limits(
    drafter: DraftersOption,
    vocabulary: Annotated[
        Path, typer.Option(help="vocabulary.json of the drafters' training runs.")
    ],
    options: WorkloadOptions,
    json_file: JsonOption = None,
) -> None:
    """Show what ends drafts: tokens outside the vocabulary; and drafters at equal anchors."""
    from sglang_dspark.evaluation.analyses.limits import compute

    session = open_session(drafter, options)
    known = read_vocabulary(vocabulary)
    finish(compute(session.traces(), known), json_file, session.console)


@app.command()
def curves(
    run: Annotated[
        list[str], typer.Option(help="LABEL=DIR of a run of `dspark train drafter`; repeat.")
    ],
    json_file: JsonOption = None,
) -> None:
    """Draw learning curves of training runs: tau on held-out answers, teacher forced."""
    from rich.console import Console

    from sglang_dspark.evaluation.analyses.curves import compute

    named = [each.partition("=") for each in run]
    bad = [label for label, separator, _ in named if not separator]
    if bad:
        raise DSparkError(f"--run takes LABEL=DIR, found {bad[0]}")
    finish(compute([(label, Path(d)) for label, _, d in named]), json_file, Console())
