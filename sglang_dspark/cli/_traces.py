"""`dspark eval traces`: record the traces behind the published results of drafters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from sglang_dspark.cli._analysis import Session
    from sglang_dspark.cli._workload import DrafterArgument
    from sglang_dspark.evaluation.recording import Workload
    from sglang_dspark.evaluation.trace_plan import PlannedDrafter, TracePlan, TraceSet
    from sglang_dspark.evaluation.traces import Trace

DEFAULT_PLAN = Path("traces")


def traces(
    plan: Annotated[
        Path, typer.Option(help="Traces and drafters: a YAML file, or a name of configs/eval.")
    ] = DEFAULT_PLAN,
    only: Annotated[str | None, typer.Option(help="One set of the plan alone.")] = None,
) -> None:
    """Record all traces whose drafters are here; print how to make the other drafters.

    An existing trace of the same drafter and settings is kept.
    """
    from rich.console import Console

    from sglang_dspark.cli._progress import says_when_stopped
    from sglang_dspark.evaluation.trace_plan import load_plan
    from sglang_dspark.shipped import config_file

    console = Console()
    wanted = load_plan(config_file("eval", plan))
    missing: dict[str, str] = {}
    with says_when_stopped():
        for name, each in wanted.chosen(only).items():
            missing |= _make(wanted, name, each)
    for what, how in missing.items():
        made_by = f"; make it by: {how}" if how else ""
        console.print(f"not here: {what}{made_by}", soft_wrap=True, highlight=False, markup=False)
    if missing:
        raise typer.Exit(1)


def _make(plan: TracePlan, name: str, each: TraceSet) -> dict[str, str]:
    """Write the traces of one set; return the missing inputs, with the command that makes each."""
    from sglang_dspark.cli._analysis import redrafted

    if each.absent_prompts:
        return {f"prompts of {name}: {', '.join(each.absent_prompts)}": ""}
    named = dict.fromkeys((each.answers.by, *each.traces.values()))
    missing = {
        f"{drafter} ({plan.drafters[drafter].path})": plan.drafters[drafter].made_by
        for drafter in named
        if not plan.drafters[drafter].is_here
    }
    engine = plan.drafters[each.answers.by]
    if not engine.is_here:
        return missing
    answers = plan.folder / each.answers.file
    _write(plan, each, {answers: engine}, lambda session: list(session.traces().values()))
    places = {
        plan.folder / name / f"{label}.json": plan.drafters[drafter]
        for label, drafter in each.traces.items()
        if plan.drafters[drafter].is_here
    }
    _write(plan, each, places, lambda session: redrafted(session, answers, True))
    return missing


def _write(
    plan: TracePlan,
    each: TraceSet,
    places: Mapping[Path, PlannedDrafter],
    make: Callable[[Session], list[Trace]],
) -> None:
    """Make and write the missing traces of `places`, all in one run."""
    from sglang_dspark.evaluation.traces import write_trace

    found = _session(plan, each, places)
    todo = {
        path: drafter
        for (path, drafter), argument in zip(places.items(), found.drafters, strict=True)
        if not _is_kept(path, argument, found.workload())
    }
    if not todo:
        return
    session = _session(plan, each, todo)
    for path, trace in zip(todo, make(session), strict=True):
        write_trace(path, trace)
        session.console.print(f"written to {path}", highlight=False, soft_wrap=True)


def _session(plan: TracePlan, each: TraceSet, places: Mapping[Path, PlannedDrafter]) -> Session:
    from sglang_dspark.cli._analysis import open_session
    from sglang_dspark.cli._workload import WorkloadOptions

    options = WorkloadOptions(
        target=plan.target,
        prompts=list(each.prompts),
        limit=each.limit,
        max_new_tokens=each.max_new_tokens,
        temperature=each.temperature,
        batch=each.batch,
        seed=each.seed,
    )
    named = [f"{path.stem}={drafter.argument}" for path, drafter in places.items()]
    return open_session(named, options)


def _is_kept(path: Path, drafter: DrafterArgument, work: Workload) -> bool:
    """Return whether a trace of this drafter, target, prompts and settings exists."""
    from sglang_dspark.errors import DSparkError
    from sglang_dspark.evaluation.recording import describe, settings_json
    from sglang_dspark.evaluation.traces import prompt_digest, read_trace

    try:
        trace = read_trace(path)
    except DSparkError:
        return False
    return (
        trace.drafter == describe(drafter.path, drafter.gamma or trace.gamma)
        and trace.target_sha256 == work.target_sha256
        and [prompt.digest for prompt in trace.prompts] == [prompt_digest(ids) for ids in work.ids]
        and settings_json(work.settings).items() <= trace.settings.items()
    )
