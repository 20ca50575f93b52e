"""Share code between the commands of `dspark eval`: drafters, traces, tables, result files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from sglang_dspark.cli._workload import (
    DrafterArgument,
    WorkloadOptions,
    device_description,
    open_workload,
    parse_drafter,
    trace_of,
)
from sglang_dspark.errors import DSparkError

if TYPE_CHECKING:
    from sglang_dspark.evaluation.analyses.analysis import Result
    from sglang_dspark.evaluation.recording import Workload
    from sglang_dspark.evaluation.traces import Trace
    from sglang_dspark.schedule.sts_file import StsFile


@dataclass(frozen=True)
class Session:
    """The drafters of one command, and a way to get their traces."""

    drafters: tuple[DrafterArgument, ...]
    workload: Callable[[], Workload]
    console: Console

    def series(self) -> list[tuple[str, Trace]]:
        """Return label and trace of every drafter, in the order given."""
        return [(d.label, trace_of(d, self.workload, self.console)) for d in self.drafters]

    def traces(self) -> dict[str, Trace]:
        """Return traces by label. Raises DSparkError if a label is used twice."""
        labels = [drafter.label for drafter in self.drafters]
        if len(set(labels)) < len(labels):
            raise DSparkError(f"labels must differ here, found {', '.join(labels)}")
        return dict(self.series())


def open_session(drafters: Sequence[str], options: WorkloadOptions) -> Session:
    """Return the inputs that a command's options describe; load nothing yet."""
    console = Console()
    workload = cache(lambda: open_workload(options, console))
    return Session(tuple(parse_drafter(each) for each in drafters), workload, console)


def finish(result: Result, json_file: Path | None, console: Console) -> None:
    """Show a result, write its file and its figure, and print their paths."""
    from sglang_dspark.evaluation import figures
    from sglang_dspark.evaluation.analyses import registry
    from sglang_dspark.loadtest.results import write_results

    analysis = registry.of(result)
    for shown in analysis.table(result) if analysis.table is not None else ():
        console.print(shown)
    name = f"drafters_{analysis.name}{'_sampled' if result.sampled else ''}"
    path = json_file or Path("results") / f"{name}.json"
    write_results(path, path.stem, device_description(), result.to_json())
    drawn = figures.save(figures.draw(result), path.parent / "figures" / path.stem)
    for each in (path, *drawn):
        console.print(f"written to {each}", highlight=False, soft_wrap=True)


def redrafted(session: Session, answers: Path, transition: bool) -> list[Trace]:
    """Redraft with the session's drafters on the answers of a trace; return their traces."""
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
    """Read token ids from a JSON list. Raises DSparkError if the file has none."""
    from sglang_dspark.common.files import load_json, reading

    with reading(path, "vocabulary", "name vocabulary.json of a training run"):
        ids = load_json(path)
        if not ids or not all(isinstance(each, int) for each in ids):
            raise ValueError("not a list of token ids")
        return frozenset(ids)


def with_confidence(session: Session) -> dict[str, Trace]:
    """Return traces of the drafters with a confidence; print one line for each of the others."""
    usable = {}
    for label, trace in session.traces().items():
        if trace.has_confidence():
            usable[label] = trace
        else:
            session.console.print(f"{label} has no confidence: skipped", style="yellow")
    if not usable:
        raise DSparkError("no drafter with a confidence to show: name one that has a head for it")
    return usable


def table_of(argument: DrafterArgument, trace: Trace, sts: Path | None) -> StsFile | None:
    """Read a drafter's calibration table; return None if neither `sts` nor its folder has one."""
    from sglang_dspark.schedule.sts_file import FILE_NAME, read_sts

    path = sts or argument.path / FILE_NAME
    if sts is None and not path.is_file():
        return None
    return read_sts(path, drafter_sha256=trace.drafter.sha256, gamma=trace.gamma)
