"""`dspark calibrate`: fit a drafter's confidence to real acceptance and write sts.json.

It is fitted on the package's calibration prompts and judged on its evaluation prompts, or on the
user's prompts or records, which are halved if no others to judge on are named.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sglang_dspark.cli._models import note_unless_served
from sglang_dspark.cli._workload import (
    SAMPLING,
    DrafterArgument,
    DrafterOption,
    WorkloadOptions,
    counter,
    given,
    open_workload,
    parse_drafter,
    takes_workload,
    target_dir,
)
from sglang_dspark.errors import DSparkError

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_dspark.evaluation.traces import Trace
    from sglang_dspark.schedule.calibration import Binning, Observations
    from sglang_dspark.schedule.sts_file import StsFile, StsTable

FittedPromptsOption = Annotated[
    list[str] | None,
    typer.Option(
        help="File of prompts to fit on, as [DOMAIN=]FILE; repeat for several. Default: the "
        "package's calibration prompts."
    ),
]
HeldOutOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Prompts to judge on, likewise. Default: the package's evaluation prompts, or a half "
        "of --prompts."
    ),
]
TemperaturesOption = Annotated[
    list[float] | None,
    typer.Option(min=0.0, help="Of the requests; repeat for a table each. Default: 0 and 1."),
]
HalfProductsOption = Annotated[
    bool,
    typer.Option("--half-products", help="Answers in bfloat16; CPUs with AVX512-BF16 or AMX."),
]
TracesOption = Annotated[
    list[Path] | None,
    typer.Option(
        help="Fit on this trace of `dspark eval record`, or store of `dspark train data`, instead "
        "of decoding; repeat."
    ),
]
HeldOutTracesOption = Annotated[
    list[Path] | None,
    typer.Option(help="Judge on this trace or store; repeat. Default: a half of --trace."),
]
AdaptiveOption = Annotated[
    bool, typer.Option("--adaptive", help="STS on bins of equal count, not of equal width.")
]
TableOption = Annotated[
    Path | None, typer.Option(help="File to write. Default: sts.json beside the drafter.")
]


@dataclass(frozen=True)
class _Decode:
    """Settings for answering prompts if no record is given."""

    options: WorkloadOptions
    half_products: bool


@dataclass(frozen=True)
class _Records:
    """Drafter and target of the records to read; the default ones unless named."""

    target: str
    target_is_named: bool
    drafter: Path
    console: Console


@dataclass(frozen=True)
class _Case:
    """Traces of one sampling regime that a table is fitted to and tested on."""

    fit: Trace
    held: Trace


# Options of decoding, which do not apply to a record: it has been decoded.
_OF_DECODING = (
    "prompts",
    "held_out",
    "temperature",
    "limit",
    "max_new_tokens",
    "batch",
    "seed",
    "half_products",
)


@takes_workload(without=("prompts", "temperature", *SAMPLING), batch=32)
def calibrate(
    context: typer.Context,
    options: WorkloadOptions,
    drafter: DrafterOption = "shipped",
    prompts: FittedPromptsOption = None,
    held_out: HeldOutOption = None,
    temperature: TemperaturesOption = None,
    half_products: HalfProductsOption = False,
    trace: TracesOption = None,
    held_out_trace: HeldOutTracesOption = None,
    adaptive: AdaptiveOption = False,
    out: TableOption = None,
) -> None:
    """Fit temperatures to real acceptance, show their effect on other prompts, write both."""
    from rich.console import Console

    from sglang_dspark.schedule.sts_file import FILE_NAME, write_sts

    _refuse_unused(context, bool(trace))
    console = Console()
    argument = parse_drafter(drafter)
    if argument.is_trace:
        raise DSparkError(f"--drafter names the directory of the drafter, found a file: {drafter}")
    if trace:
        records = _Records(options.target, bool(given(context, ["target"])), argument.path, console)
        cases = _read_cases(trace, held_out_trace or [], records)
    else:
        note_unless_served(console, argument.path, target_dir(options.target, console))
        decode = _Decode(options, half_products)
        temperatures = temperature or [0.0, 1.0]
        cases = _decode_cases(argument, prompts, held_out, temperatures, decode, console)
    names = [each.name for each in trace or ()] or prompts or ["sglang-dspark calibration prompts"]
    sts = _fit_all(cases, ", ".join(names), "mass" if adaptive else "width", console)
    path = out or argument.path / FILE_NAME
    write_sts(path, sts)
    console.print(f"written to {path}", highlight=False, soft_wrap=True)


def _refuse_unused(context: typer.Context, recorded: bool) -> None:
    """Raise DSparkError for options that would be ignored silently."""
    for option in given(context, _OF_DECODING if recorded else ["held_out_trace"]):
        why = "says how to decode, a --trace is decoded: leave one out"
        raise DSparkError(f"{option} {why if recorded else 'judges a --trace: give both'}")


def _fit_all(cases: Sequence[_Case], dataset: str, binning: Binning, console: Console) -> StsFile:
    """Fit a table for each case. Raises DSparkError if two are of one sampling regime."""
    from sglang_dspark.schedule.sts_file import StsFile

    tables: dict[str, StsTable] = {}
    for case in cases:
        name, table = _fit(case, dataset, binning, console)
        if name in tables:
            raise DSparkError(f"two runs are {name}: one table a regime, so give one of each")
        tables[name] = table
    return StsFile(
        tables=tables,
        drafter_sha256=cases[0].fit.drafter.sha256,
        target_sha256=cases[0].fit.target_sha256,
        fit_prompts=tuple(sorted({p.digest for case in cases for p in case.fit.prompts})),
        versions=_versions(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _decode_cases(
    argument: DrafterArgument,
    prompts: list[str] | None,
    held_out: list[str] | None,
    temperatures: Sequence[float],
    decode: _Decode,
    console: Console,
) -> list[_Case]:
    """Answer the prompts at each temperature and replay the drafter on them."""
    cases = []
    for temperature in temperatures:
        fit = _answered(argument, prompts, "calibration", temperature, decode, console)
        if prompts and not held_out:
            cases.append(_halved(fit))
        else:
            held = _answered(argument, held_out, "evaluation", temperature, decode, console)
            cases.append(_Case(fit, held))
    return [_apart(case) for case in cases]


def _answered(
    argument: DrafterArgument,
    files: list[str] | None,
    default: str,
    temperature: float,
    decode: _Decode,
    console: Console,
) -> Trace:
    """Answer prompts of files, or the package's `default` prompts, and replay the drafter."""
    from sglang_dspark.cli._progress import stages
    from sglang_dspark.evaluation import prompts as shipped
    from sglang_dspark.training.answering import record_answers

    options = replace(decode.options, prompts=files, temperature=temperature)
    own = {
        "calibration": shipped.calibration_prompts,
        "evaluation": shipped.evaluation_prompts,
    }[default]
    work = open_workload(options, console, own)
    with stages(console) as progress:
        name = f"{default} answers, T={temperature:g}"
        return record_answers(
            work,
            argument.path,
            half_products=decode.half_products,
            on_finish=counter(progress, name, len(work.ids)),
        )


def _read_cases(files: Sequence[Path], held: Sequence[Path], records: _Records) -> list[_Case]:
    """Read cases from recorded traces or stores, paired by sampling regime."""
    from sglang_dspark.schedule.sts_file import regime

    fits = _read_traces(files, records)
    if not held:
        return [_halved(each) for each in fits]
    judged = _read_traces(held, records)
    if judged[0].target_sha256 != fits[0].target_sha256:
        raise DSparkError(f"{held[0]} is a trace of another target than {files[0]}: record it")
    by_regime = {regime(each.temperature): each for each in judged}
    if len(by_regime) < len(judged):
        raise DSparkError("two --held-out-trace are of one sampling regime: give one of each")
    cases = []
    for each in fits:
        name = regime(each.temperature)
        if name not in by_regime:
            raise DSparkError(f"no --held-out-trace is {name}, a --trace is: give both")
        cases.append(_apart(_Case(each, by_regime[name])))
    return cases


def _read_traces(files: Sequence[Path], records: _Records) -> list[Trace]:
    """Read this drafter's traces on one target; replay stores. Raises DSparkError for others."""
    from sglang_dspark.evaluation.traces import read_trace
    from sglang_dspark.models.identity import target_sha256 as weights_sha256
    from sglang_dspark.training.answering import traces_of_store

    drafter, console = records.drafter, records.console
    wanted = weights_sha256(drafter)
    first, target = str(files[0]), ""
    if records.target_is_named:
        first = f"--target {records.target}"
        target = weights_sha256(target_dir(records.target, console))
    traces: list[Trace] = []
    for file in files:
        if file.is_dir():
            _say_if_trained_on(drafter, file, console)
            found = traces_of_store(file, target_dir(records.target, console), drafter)
        else:
            found = [read_trace(file)]
        for trace in found:
            if trace.drafter.sha256 != wanted:
                raise DSparkError(f"{file} is a trace of another drafter than {drafter}: record it")
            target = target or trace.target_sha256
            if trace.target_sha256 != target:
                raise DSparkError(f"{file} is a trace of another target than {first}: record it")
        traces += found
    return traces


def _say_if_trained_on(drafter: Path, store: Path, console: Console) -> None:
    """Warn if the training run that the drafter belongs to used this store."""
    from sglang_dspark.common.files import FAULTS, load_json

    with suppress(OSError, *FAULTS):
        run = load_json(drafter.resolve().parent / "run.json")
        if Path(run["config"]["data"]["store"]).resolve() == store.resolve():
            console.print(
                f"{drafter} was trained on {store}: what is fitted and judged there is text it has "
                "seen; other prompts (--prompts) tell more",
                style="yellow",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )


def _halved(trace: Trace) -> _Case:
    """Split the prompts: one half to fit on, the other half to judge on."""
    from sglang_dspark.evaluation.calibration_data import split_halves

    fit, held = split_halves(trace.prompts)
    return _Case(trace.of_prompts(fit), trace.of_prompts(held))


def _apart(case: _Case) -> _Case:
    """Remove the prompts to judge on that are also fitted."""
    from sglang_dspark.evaluation.calibration_data import held_out

    kept = held_out(case.held.prompts, {prompt.digest for prompt in case.fit.prompts})
    return replace(case, held=case.held.of_prompts(kept))


def _labels(case: _Case) -> Observations:
    """Return the labels to fit to. Raises DSparkError without a confidence or enough steps."""
    from sglang_dspark.evaluation.calibration_data import observations
    from sglang_dspark.schedule.calibration import MINIMUM_LABELS

    fit, held = case.fit, case.held
    if not fit.has_confidence():
        raise DSparkError(f"{fit.drafter.name} has no confidence to calibrate")
    data = observations(fit.generations, fit.gamma)
    if len(data.logits) < MINIMUM_LABELS or not held.prompts:
        raise DSparkError(
            f"{len(data.logits)} verify steps to fit on (at least {MINIMUM_LABELS} are needed) and "
            f"{len(held.prompts)} prompts to judge on: give more prompts or raise --max-new-tokens"
        )
    return data


def _fit(case: _Case, dataset: str, binning: Binning, console: Console) -> tuple[str, StsTable]:
    """Fit one case; print results on the held-out prompts, return regime and table."""
    from sglang_dspark.cli._calibration_view import show_tables
    from sglang_dspark.evaluation.analyses.reliability import (
        held_out_summary,
        lines,
        reliability,
    )
    from sglang_dspark.schedule import calibration
    from sglang_dspark.schedule.sts_file import StsTable, regime

    name, fit, held = regime(case.fit.temperature), case.fit, case.held
    data = _labels(case)
    fitted = calibration.fit(data, binning=binning)
    ours = calibration.fit_shifts(data)
    variants = {
        "after": calibration.Calibration(fitted.temperatures),
        "shifted": replace(ours, spread=0.0),
        "followed": ours,
    }
    groups = reliability(held, variants)
    for line in lines(f"{name}: {len(held.prompts)} held-out prompts", groups):
        console.print(line)
    show_tables(console, variants, len(fit.prompts))
    return name, StsTable(
        temperatures=fitted.temperatures,
        sampling={key: fit.settings[key] for key in ("temperature", "top_k", "top_p", "min_p")},
        dataset=dataset,
        prompts=len(fit.prompts),
        steps=len(data.logits),
        counts=fitted.counts,
        ece_before=fitted.ece_before,
        ece_after=fitted.ece_after,
        shift=ours.shift,
        shifted_temperatures=ours.temperatures,
        held_out={"prompts": len(held.prompts), **held_out_summary(groups)},
        position_shifts=ours.by_position,
        request_spread=ours.spread,
    )


def _versions() -> dict[str, str]:
    import numpy as np
    import torch

    from sglang_dspark import __version__

    return {"sglang_dspark": __version__, "torch": torch.__version__, "numpy": np.__version__}
