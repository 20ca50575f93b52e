"""`dspark calibrate`: fit a drafter's confidence to real acceptance and write sts.json."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglang_dspark.cli._workload import (
    BatchOption,
    LimitOption,
    PromptsOption,
    SeedOption,
    TargetOption,
    TokensOption,
    open_workload,
    parse_drafter,
    trace_of,
)
from sglang_dspark.errors import DSparkError

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_dspark.evaluation.traces import Trace
    from sglang_dspark.schedule.calibration import Binning
    from sglang_dspark.schedule.sts_file import StsTable


def calibrate(
    target: TargetOption = "demo",
    drafter: Annotated[
        str, typer.Option(help="Drafter directory, or `shipped` for the demo target's.")
    ] = "shipped",
    prompts: PromptsOption = None,
    limit: LimitOption = None,
    max_new_tokens: TokensOption = 96,
    temperature: Annotated[
        list[float] | None,
        typer.Option(min=0.0, help="Of the requests; repeat for a table each. Default: 0 and 1."),
    ] = None,
    batch: BatchOption = 8,
    seed: SeedOption = 0,
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="Use this trace of `dspark eval record` instead of decoding; repeat."),
    ] = None,
    adaptive: Annotated[
        bool, typer.Option("--adaptive", help="Fit on bins of equal count, not of equal width.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="File to write. Default: sts.json beside the drafter.")
    ] = None,
) -> None:
    """Fit temperatures on half of the prompts, show what they do on the other half, write both."""
    from rich.console import Console

    from sglang_dspark.schedule.sts_file import FILE_NAME, StsFile, write_sts

    console = Console()
    argument = parse_drafter(drafter)
    if argument.is_trace:
        raise DSparkError(f"--drafter names the directory of the drafter, found a file: {drafter}")
    if trace:
        traces = _read_traces(trace, argument.path)
    else:
        settings = (target, prompts, limit, max_new_tokens, batch, seed)
        temperatures = temperature or [0.0, 1.0]
        traces = [_decode(argument, each, settings, console) for each in temperatures]
    dataset = ", ".join(prompts) if prompts else "sglang-dspark evaluation prompts"
    tables: dict[str, StsTable] = {}
    for each in traces:
        name, table = _fit(each, dataset, "mass" if adaptive else "width", console)
        if name in tables:
            raise DSparkError(f"two runs are {name}: one table a regime, so give one of each")
        tables[name] = table
    sts = StsFile(
        tables=tables,
        drafter_sha256=traces[0].drafter.sha256,
        target_sha256=traces[0].target_sha256,
        fit_prompts=_fit_digests(traces),
        versions=_versions(),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    path = out or argument.path / FILE_NAME
    write_sts(path, sts)
    console.print(f"written to {path}", highlight=False, soft_wrap=True)


def _decode(argument: Any, temperature: float, settings: Any, console: Console) -> Trace:
    """Run the engine at one temperature."""
    from sglang_dspark.evaluation.engine import DecodeSettings

    target, prompts, limit, max_new_tokens, batch, seed = settings
    decode = DecodeSettings(
        max_new_tokens=max_new_tokens, temperature=temperature, batch=batch, seed=seed
    )
    return trace_of(
        argument, lambda: open_workload(target, prompts, limit, decode, console), console
    )


def _read_traces(files: Sequence[Path], drafter: Path) -> list[Trace]:
    """Traces of this drafter on one target; DSparkError if one is of another."""
    from sglang_dspark.evaluation.traces import read_trace
    from sglang_dspark.training.provenance import target_sha256 as weights_sha256

    wanted = weights_sha256(drafter)
    traces = [read_trace(file) for file in files]
    for file, trace in zip(files, traces, strict=True):
        if trace.drafter.sha256 != wanted:
            raise DSparkError(f"{file} is a trace of another drafter than {drafter}: record it")
        if trace.target_sha256 != traces[0].target_sha256:
            raise DSparkError(f"{file} is a trace of another target than {files[0]}: record it")
    return traces


def _fit(trace: Trace, dataset: str, binning: Binning, console: Console) -> tuple[str, StsTable]:
    """Regime and table of one trace; prints what the table does on the held-out half."""
    from sglang_dspark.cli._calibration_view import show_reliability, show_tables
    from sglang_dspark.evaluation.calibration_data import observations, split_halves
    from sglang_dspark.evaluation.reliability import held_out_summary, reliability
    from sglang_dspark.schedule import calibration
    from sglang_dspark.schedule.sts_file import StsTable, regime

    name = regime(trace.temperature)
    if not trace.has_confidence():
        raise DSparkError(f"{trace.drafter.name} tells no confidence: nothing to calibrate")
    fit_half, held = split_halves(trace.prompts)
    data = observations([trace.generations[i] for i in fit_half], trace.gamma)
    if len(data.logits) < calibration.MINIMUM_LABELS or not held:
        raise DSparkError(
            f"{len(data.logits)} verify steps are too few to fit on (at least "
            f"{calibration.MINIMUM_LABELS}): give more prompts or raise --max-new-tokens"
        )
    fitted = calibration.fit(data, binning=binning)
    shift = calibration.fit_shift(data)
    behind = calibration.fit(calibration.shifted(data, shift), binning=binning)
    variants = {
        "after": calibration.Calibration(fitted.temperatures),
        "shifted": calibration.Calibration(behind.temperatures, shift),
    }
    parts = reliability(trace.of_prompts(held), variants)
    show_reliability(console, f"{name}: {len(held)} held-out prompts", parts)
    show_tables(console, variants, len(fit_half))
    return name, StsTable(
        temperatures=fitted.temperatures,
        sampling={key: trace.settings[key] for key in ("temperature", "top_k", "top_p", "min_p")},
        dataset=dataset,
        prompts=len(fit_half),
        steps=len(data.logits),
        counts=fitted.counts,
        ece_before=fitted.ece_before,
        ece_after=fitted.ece_after,
        shift=shift,
        shifted_temperatures=behind.temperatures,
        held_out={"prompts": len(held), **held_out_summary(parts)},
    )


def _fit_digests(traces: Sequence[Trace]) -> tuple[str, ...]:
    """Digests of all prompts that any of the tables was fitted on."""
    from sglang_dspark.evaluation.calibration_data import split_halves

    used = {trace.prompts[i].digest for trace in traces for i in split_halves(trace.prompts)[0]}
    return tuple(sorted(used))


def _versions() -> dict[str, str]:
    import numpy as np
    import torch

    from sglang_dspark import __version__

    return {"sglang_dspark": __version__, "torch": torch.__version__, "numpy": np.__version__}
