"""`dspark eval`: measure acceptance of a drafter by the reference engine, and through a server."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglang_dspark.cli._models import note_unless_served
from sglang_dspark.cli._workload import (
    TOP_K_ALL,
    DrafterOption,
    WorkloadOptions,
    counter,
    drafter_dir,
    given,
    open_tokenizer,
    read_prompt_files,
    takes_workload,
    target_dir,
)
from sglang_dspark.errors import DSparkError
from sglang_dspark.models.resolve import model_name

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_dspark.evaluation.engine import DecodeSettings
    from sglang_dspark.evaluation.prompts import EvalPrompt
    from sglang_dspark.evaluation.report import Agreement, Report
    from sglang_dspark.loadtest.servers.server import ServerSpec

EvaluatedPromptsOption = Annotated[
    list[str] | None,
    typer.Option(
        help="File of prompts as [DOMAIN=]FILE; repeat for several. Default: the package's own."
    ),
]
PromptFieldOption = Annotated[
    str | None, typer.Option(help="Field of the text in those files, if it is not found.")
]
GammaOption = Annotated[
    int | None, typer.Option(min=1, help="Block size, default the trained one.")
]
ServerOption = Annotated[
    str | None, typer.Option(help="Also measure through this DSPARK server, e.g. its URL.")
]
ServeOption = Annotated[
    bool, typer.Option("--serve", help="Also measure through a server started for it.")
]
PortOption = Annotated[int, typer.Option(help="Port of that server.")]
NumbersOption = Annotated[
    Path | None, typer.Option("--json", help="Write the numbers to this file.")
]


@takes_workload(without=("prompts", "temperature"))
def evaluate(
    context: typer.Context,
    options: WorkloadOptions,
    drafter: DrafterOption = "shipped",
    prompts: EvaluatedPromptsOption = None,
    prompt_field: PromptFieldOption = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    gamma: GammaOption = None,
    server: ServerOption = None,
    serve: ServeOption = False,
    port: PortOption = 30000,
    results: NumbersOption = None,
) -> None:
    """Measure how many drafts the target accepts: tau, acceptance by position, confidence."""
    if context.invoked_subcommand is not None:  # such as `dspark eval tau ...`
        _refuse_options_before(context, context.invoked_subcommand)
        return
    from rich.console import Console

    from sglang_dspark.loadtest.results import require_clean

    require_clean(results)
    _require_servable(drafter_dir(drafter), server, serve, gamma)
    console = Console()
    options = replace(options, prompts=prompts, temperature=temperature)
    settings = options.decoding(gamma)
    subject = open_subject(options, drafter, prompt_field, console)
    note_unless_served(console, subject.drafter, subject.target)
    document = _measure(subject, settings, server, serve, port, console)
    if results is not None:
        _write(results, document)
        console.print(f"written to {results}", highlight=False)


def _measure(
    subject: Subject,
    settings: DecodeSettings,
    server: str | None,
    serve: bool,
    port: int,
    console: Console,
) -> dict[str, Any]:
    """Measure through the engine and, if requested, a server; return the result file's metrics."""
    outcome = _measure_engine(subject, settings, console)
    show_report(console, "reference engine", outcome.report)
    document: dict[str, Any] = {
        "target": model_name(subject.target),
        "drafter": model_name(subject.drafter),
        "settings": _settings_json(settings, outcome.gamma),
        "engine": outcome.metrics,
    }
    if server is not None or serve:
        with _server(server, subject, port, console) as url:
            document.update(_measure_server(url, subject, settings, outcome, console))
    return document


def _require_servable(drafter: Path, server: str | None, serve: bool, gamma: int | None) -> None:
    """Check options before the target is loaded: a server has its own gamma; only DSPARK starts."""
    if server is not None and serve:
        raise DSparkError("--server and --serve exclude each other: name one")
    if server is not None:
        from sglang_dspark.loadtest.sweep.config import require_no_credentials

        require_no_credentials(server)
    if serve and gamma is not None:
        raise DSparkError("--serve takes the drafter's own gamma: leave --gamma out")
    if serve:
        _require_served(drafter)
    _require_gamma(drafter, gamma)


def _refuse_options_before(context: typer.Context, command: str) -> None:
    """Raise DSparkError for options ahead of a command, which would be ignored silently."""
    for option in given(context, context.params):
        raise DSparkError(f"write {option} behind the command: dspark eval {command} ...")


def _require_served(drafter: Path) -> None:
    from sglang_dspark.families.registry import drafter_kind

    if drafter_kind(drafter) == "dflash":
        raise DSparkError(
            f"--serve starts a DSPARK server, {drafter} is a DFlash drafter: convert it (dspark "
            "models convert), or start its server yourself and give --server URL"
        )


def _require_gamma(drafter: Path, gamma: int | None) -> None:
    """Check gamma before the target is loaded, for the kinds whose block is trained whole."""
    from sglang_dspark.drafter.config import DrafterConfig
    from sglang_dspark.families.registry import drafter_kind

    if drafter_kind(drafter) != "dspark" or gamma is None:
        return
    trained = DrafterConfig.from_dir(drafter).gamma
    if gamma > trained:
        raise DSparkError(
            f"--gamma {gamma} exceeds the block of {trained} that {drafter} was trained for; name "
            f"1..{trained}, or leave it out"
        )


@dataclass(frozen=True)
class Subject:
    """Inputs of a measurement: directories, prompts, and the prompts' token ids."""

    target: Path
    drafter: Path
    prompts: list[EvalPrompt]
    ids: list[list[int]]
    stop_ids: frozenset[int]

    @property
    def domains(self) -> list[str]:
        return [prompt.domain for prompt in self.prompts]


@dataclass(frozen=True)
class _EngineOutcome:
    """The engine's numbers and output tokens."""

    gamma: int
    report: Report
    metrics: dict[str, Any]
    tokens: list[tuple[int, ...]]


def open_subject(
    options: WorkloadOptions, drafter: str, prompt_field: str | None, console: Console
) -> Subject:
    """Open the prompts and models that a command names."""
    from sglang_dspark.evaluation import prompts as prompt_files

    path = target_dir(options.target, console)
    found = read_prompt_files(options.prompts, prompt_field)
    chosen = prompt_files.limit_per_domain(found, options.limit)
    tokenizer = open_tokenizer(path)
    return Subject(
        target=path,
        drafter=drafter_dir(drafter),
        prompts=chosen,
        ids=[prompt_files.encode(tokenizer, prompt) for prompt in chosen],
        stop_ids=prompt_files.stop_token_ids(path, tokenizer),
    )


def _measure_engine(subject: Subject, settings: DecodeSettings, console: Console) -> _EngineOutcome:
    from transformers.utils import logging as transformers_logging

    from sglang_dspark.cli._progress import stages
    from sglang_dspark.evaluation import report as reports
    from sglang_dspark.evaluation.engine import ReferenceEngine
    from sglang_dspark.evaluation.target import TargetModel
    from sglang_dspark.families.registry import drafter_layers, open_drafter

    transformers_logging.disable_progress_bar()
    model = TargetModel.load(subject.target, drafter_layers(subject.drafter))
    drafter = open_drafter(subject.drafter, model)
    engine = ReferenceEngine(model, drafter, replace(settings, stop_ids=subject.stop_ids))
    with stages(console) as progress:
        count = counter(progress, "reference engine", len(subject.ids))
        generations = engine.run(subject.ids, lambda _index, _generation: count())
    report = _nonempty(reports.engine_report(subject.domains, generations, engine.gamma))
    return _EngineOutcome(
        gamma=engine.gamma,
        report=report,
        metrics=reports.metrics(report),
        tokens=[generation.tokens for generation in generations],
    )


def _measure_server(
    url: str,
    subject: Subject,
    settings: DecodeSettings,
    outcome: _EngineOutcome,
    console: Console,
) -> dict[str, Any]:
    """Measure through the server, print, and return the `served` and `agreement` metrics."""
    from sglang_dspark.cli._progress import stages
    from sglang_dspark.evaluation import report as reports
    from sglang_dspark.loadtest.bench.acceptance import measure

    with stages(console) as progress:
        count = counter(progress, "server", len(subject.ids))
        answers = measure(url, subject.ids, settings, lambda _index: count())
    counts = [answer.counts for answer in answers]
    served = _nonempty(reports.served_report(subject.domains, counts))
    served_gamma = len(counts[0].histogram) - 1
    if served_gamma != outcome.gamma:
        raise DSparkError(
            f"the server drafts {served_gamma} tokens a step, the engine {outcome.gamma}: pass "
            f"--gamma {served_gamma}, or start the server with the same drafter"
        )
    show_report(console, "server", served)
    compared = reports.agreement(
        outcome.report,
        served,
        outcome.tokens,
        [answer.tokens for answer in answers],
        greedy=settings.temperature == 0,
    )
    show_agreement(console, compared)
    return {"served": reports.metrics(served), "agreement": asdict(compared)}


@contextmanager
def _server(url: str | None, subject: Subject, port: int, console: Console) -> Iterator[str]:
    """Yield the URL of the given server, or of one that runs only during the block."""
    if url is not None:
        yield url.rstrip("/")
        return
    from sglang_dspark.cli._progress import stages
    from sglang_dspark.loadtest.servers.server import ServerProcess, run_directory, stop_on_signals

    run_dir = run_directory()
    spec = engine_like_server(subject, port, run_dir)
    with stop_on_signals(), ServerProcess(spec, run_dir) as process:
        with stages(console) as progress:
            process.start()
            process.wait_ready(600.0, lambda _waited: progress("starting the server", 0, 0))
        yield spec.url


def engine_like_server(subject: Subject, port: int, run_dir: Path) -> ServerSpec:
    """Return a DSPARK server that steps like the engine.

    It verifies every draft, so that tau is the drafter's and not the scheduler's, and judges
    sampled drafts token by token.
    """
    import torch

    from sglang_dspark.loadtest.servers.workload import dspark_server

    device = "cuda" if torch.cuda.is_available() else "cpu"
    spec = dspark_server(subject.target, subject.drafter, port, device)
    config = run_dir / "eval.yaml"
    config.write_text("verify: {rule: token}\n")
    return replace(
        spec,
        arguments=(*spec.arguments, "--dspark-config", str(config)),
        environment={**spec.environment, "SGLANG_RAGGED_VERIFY_MODE": "static"},
    )


def _nonempty(report: Report) -> Report:
    if not report:
        raise DSparkError(
            "no answer had a verify step: every one ended with its first token; check the prompts, "
            "or raise --max-new-tokens"
        )
    return report


def show_report(console: Console, title: str, report: Report) -> None:
    """Print a report: tau and confidence by domain, then acceptance by position."""
    from rich.table import Table

    known = any(part.confidence is not None for part in report.values())
    summary = Table(title=f"{title}: tau, tokens per verify step with the bonus")
    names = ["prompts", "steps", "tau", "95% interval", "accept length"]
    summary.add_column("domain")
    for name in names + (["AUC", "ECE"] if known else []):
        summary.add_column(name, justify="right")
    for domain, part in report.items():
        a = part.acceptance
        cells = [str(a.prompts), str(a.steps), f"{a.tau:.3f}", f"{a.tau_low:.2f}-{a.tau_high:.2f}"]
        cells.append(f"{a.accept_length:.3f}")
        if part.confidence is not None:
            cells += [f"{part.confidence.auc:.3f}", f"{part.confidence.ece:.1%}"]
        summary.add_row(domain, *cells)
    console.print(summary)
    console.print("accept length: completion tokens / verify steps", style="dim")

    positions = Table(title="drafts 1..k accepted (draft k, given those before it)")
    positions.add_column("domain")
    for k in range(len(next(iter(report.values())).acceptance.cumulative)):
        positions.add_column(f"k = {k + 1}", justify="right")
    for domain, part in report.items():
        a = part.acceptance
        shares = zip(a.cumulative, a.conditional, strict=True)
        positions.add_row(domain, *(_share(both, alone) for both, alone in shares))
    console.print(positions)


def _share(both: float, alone: float) -> str:
    """Format cumulative and, in brackets, conditional acceptance; the latter may be unknown."""
    return f"{both:.0%} (-)" if math.isnan(alone) else f"{both:.0%} ({alone:.0%})"


def show_agreement(console: Console, compared: Agreement) -> None:
    """Print the server's difference from the engine."""
    line = (
        f"server against engine: tau {compared.tau_percent:+.2f}%, "
        f"accept length {compared.accept_length_percent:+.2f}%"
    )
    if compared.equal is not None:
        line += f", {compared.equal} of {compared.prompts} outputs equal token for token"
    console.print(line, highlight=False)


def _settings_json(settings: DecodeSettings, gamma: int) -> dict[str, Any]:
    values = asdict(settings)
    del values["stop_ids"]
    if settings.top_k == TOP_K_ALL:
        values["top_k"] = None
    return {**values, "gamma": gamma}


def _write(path: Path, document: dict[str, Any]) -> None:
    from sglang_dspark.common.machine import cpu_description
    from sglang_dspark.loadtest.results import write_results

    write_results(path, "eval", cpu_description(), document)
