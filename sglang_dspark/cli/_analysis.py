"""What the commands of `dspark eval` share: drafters and their traces, tables, result files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from sglang_dspark.cli._workload import (
    TOP_K_ALL,
    DrafterArgument,
    device_description,
    open_workload,
    parse_drafter,
    trace_of,
)
from sglang_dspark.errors import DSparkError

if TYPE_CHECKING:
    from sglang_dspark.evaluation.recording import Workload
    from sglang_dspark.evaluation.traces import Trace


@dataclass(frozen=True)
class Session:
    """The drafters of one command, and a way to get their traces."""

    drafters: tuple[DrafterArgument, ...]
    workload: Callable[[], Workload]
    console: Console

    def series(self) -> list[tuple[str, Trace]]:
        """Label and trace of every drafter, in the order they were named."""
        return [(d.label, trace_of(d, self.workload, self.console)) for d in self.drafters]

    def traces(self) -> dict[str, Trace]:
        """Traces by label. Raises DSparkError when a label is used twice."""
        labels = [drafter.label for drafter in self.drafters]
        if len(set(labels)) < len(labels):
            raise DSparkError(f"labels must differ here, found {', '.join(labels)}")
        return dict(self.series())


def open_session(
    drafters: Sequence[str],
    target: str,
    prompts: Sequence[str] | None,
    limit: int | None,
    max_new_tokens: int,
    temperature: float,
    batch: int,
    seed: int,
    *,
    top_k: int = TOP_K_ALL,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Session:
    """What the options of a command describe; nothing is loaded yet."""
    from sglang_dspark.evaluation.engine import DecodeSettings

    console = Console()
    settings = DecodeSettings(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        batch=batch,
        seed=seed,
    )
    workload = cache(lambda: open_workload(target, prompts, limit, settings, console))
    return Session(tuple(parse_drafter(each) for each in drafters), workload, console)


def finish(metrics: Mapping[str, Any], json_file: Path | None, console: Console) -> None:
    """Write the result file and its figure, and say where they are."""
    from sglang_dspark.evaluation import figures
    from sglang_dspark.loadtest.results import write_results

    settings = metrics["settings"]
    decoded_hot = settings["temperature"] > 0 and not settings.get("teacher_forced", False)
    name = f"drafters_{metrics['analysis']}{'_sampled' if decoded_hot else ''}"
    path = json_file or Path("results") / f"{name}.json"
    write_results(path, path.stem, device_description(), metrics)
    drawn = figures.save(figures.draw(metrics), path.parent / "figures" / path.stem)
    for each in (path, *drawn):
        console.print(f"written to {each}", highlight=False, soft_wrap=True)


def redrafted(session: Session, answers: Path, transition: bool) -> list[Trace]:
    """Traces of the session's drafters, drafting on the answers of a greedy trace."""
    from sglang_dspark.cli._progress import stages
    from sglang_dspark.cli._workload import counter
    from sglang_dspark.evaluation.redraft import Subject, redraft
    from sglang_dspark.evaluation.traces import read_trace

    for each in session.drafters:
        if each.is_trace:
            raise DSparkError(
                f"--answers drafts again: name a drafter's directory, not {each.path}"
            )
    recorded, work = read_trace(answers), session.workload()
    subjects = [Subject(each.path, each.gamma, transition) for each in session.drafters]
    with stages(session.console) as progress:
        return redraft(work, subjects, recorded, counter(progress, "drafting", len(work.ids)))


def read_vocabulary(path: Path) -> frozenset[int]:
    """Token ids of a JSON list. Raises DSparkError when the file holds none."""
    from sglang_dspark.common.files import load_json, reading

    with reading(path, "vocabulary", "name vocabulary.json of a training run"):
        ids = load_json(path)
        if not ids or not all(isinstance(each, int) for each in ids):
            raise ValueError("not a list of token ids")
        return frozenset(ids)


def with_confidence(session: Session) -> dict[str, Trace]:
    """Traces of the drafters that tell a confidence; of the others one line each is printed."""
    usable = {}
    for label, trace in session.traces().items():
        if trace.has_confidence():
            usable[label] = trace
        else:
            session.console.print(f"{label} tells no confidence: left out", style="yellow")
    if not usable:
        raise DSparkError("no drafter with a confidence to show: name one that has a head for it")
    return usable


def table_of(argument: DrafterArgument, trace: Trace, sts: Path | None) -> Any:
    """The calibration table for a drafter, or None when none is named and none lies there."""
    from sglang_dspark.schedule.sts_file import FILE_NAME, read_sts

    path = sts or argument.path / FILE_NAME
    if sts is None and not path.is_file():
        return None
    return read_sts(path, drafter_sha256=trace.drafter.sha256, gamma=trace.gamma)


def show_tau(console: Console, metrics: Mapping[str, Any]) -> None:
    """Print Table 1."""
    from rich.table import Table

    labels = list(metrics["tau"])
    groups = list(metrics["tau"][labels[0]])
    table = Table(title="tau, tokens per verify step with the bonus (95% over prompts)")
    for name in ("drafter", *groups):
        table.add_column(name, justify="left" if name == "drafter" else "right")
    for label in labels:
        cells = []
        for group in groups:
            low, high = metrics["interval"][label][group]
            cells.append(f"{metrics['tau'][label][group]:.3f} ({low:.2f}-{high:.2f})")
        table.add_row(label, *cells)
    for pair, ratios in metrics["ratio"].items():
        percent = [
            f"{100 * (r['value'] - 1):+.1f}% ({100 * (r['low'] - 1):+.1f} to "
            f"{100 * (r['high'] - 1):+.1f})"
            for r in (ratios[group] for group in groups)
        ]
        table.add_row(pair, *percent)
    console.print(table)
