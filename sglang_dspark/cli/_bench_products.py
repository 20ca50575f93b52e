"""`dspark bench products`: time a decode step's matrix products by weight format and rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sglang_dspark.cli._workload import chosen

if TYPE_CHECKING:
    from torch import Tensor

    from sglang_dspark.backends.cpu.linear import NarrowMatmul
    from sglang_dspark.backends.cpu.weight_formats import WeightFormat

RESULTS = Path("results/products_cpu.json")
# Weights [N, K] of SmolLM2-135M, layer by layer and the LM head: 134 million numbers.
_LAYER = ((960, 576), (576, 576), (3072, 576), (576, 1536))
SHAPES = (*(_LAYER * 30), (49152, 576))


def products(
    formats: Annotated[str, typer.Option(help="Of `cpu.weights`.")] = "float32,bfloat16,int8",
    activations: Annotated[str, typer.Option(help="Of `cpu.activations`.")] = "wide,narrow",
    rows: Annotated[str, typer.Option(help="Rows of a step, comma-separated.")] = "1,2,4,6,12,24",
    levels: Annotated[
        str, typer.Option(help="Caches that float weights are fetched into, 1 and 2.")
    ] = "1,2",
    repeats: Annotated[int, typer.Option(min=3, help="In turn.")] = 11,
    out: Annotated[Path, typer.Option("--json", help="Result file.")] = RESULTS,
) -> None:
    """Time all matrix products of a decode step of SmolLM2-135M on one thread, in milliseconds."""
    from rich.console import Console

    from sglang_dspark.backends.cpu.linear import MAX_ROWS, Processor, why_not
    from sglang_dspark.backends.cpu.weight_formats import FORMATS
    from sglang_dspark.common.machine import cpu_description
    from sglang_dspark.errors import DSparkError
    from sglang_dspark.loadtest.results import require_clean, write_results

    console = Console(stderr=True, highlight=False)
    names = chosen("--formats", formats, FORMATS)
    told = chosen("--activations", activations, ("wide", "auto", "narrow"))
    counts = _numbers("--rows", rows, MAX_ROWS)
    caches = _numbers("--levels", levels, 2)
    if (reason := why_not()) is not None:
        raise DSparkError(f"there is nothing to measure: {reason}")
    require_clean(out)
    found = []
    for name in names:
        for way in _ways(FORMATS[name], told):
            for row in _measured(way, counts, caches, repeats):
                found.append(row)
                console.print(_line(row))
    metrics = {"level_served": Processor.host().level, "threads": 1, "products": found}
    write_results(out, out.stem, cpu_description(), metrics)
    console.print(f"written to {out}")


def _numbers(option: str, text: str, most: int) -> list[int]:
    from sglang_dspark.errors import DSparkError

    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(numbers) < 1 or max(numbers) > most:
        raise DSparkError(f"{option} {text!r}: give numbers from 1 to {most}, such as 1,{most}")
    return numbers


@dataclass(frozen=True)
class _Way:
    """A format, and whether rows are rounded to bfloat16 with it."""

    form: WeightFormat
    rounding: bool
    activations: str


def _ways(form: WeightFormat, told: Sequence[str]) -> list[_Way]:
    """Return the implementations of a format's product on this processor."""
    from sglang_dspark.backends.cpu.linear import Processor
    from sglang_dspark.backends.cpu.weight_formats import BFLOAT16, BYTES, INT8

    host, ways = Processor.host(), []
    able = host.multiplies(BYTES if form is INT8 else form)
    if "wide" in told or not able or (form is INT8 and "auto" in told):
        ways.append(_Way(form, rounding=False, activations="16-bit" if form is INT8 else "float32"))
    if "narrow" in told and form is INT8 and able:
        ways.append(_Way(BYTES, rounding=False, activations="8-bit"))
    if set(told) & {"auto", "narrow"} and form is BFLOAT16 and able:
        ways.append(_Way(BFLOAT16, rounding=True, activations="bfloat16"))
    return ways


def _measured(
    way: _Way, counts: Sequence[int], levels: Sequence[int], repeats: int
) -> list[dict[str, Any]]:
    """Measure each number of rows and cache level; int8 has its own fetch instead of levels."""
    from sglang_dspark.backends.cpu.linear import Processor, find_matmul
    from sglang_dspark.backends.cpu.weight_formats import PANELS

    form = way.form
    weights, host = _weights(form), Processor.host()
    caches: list[int | None] = [None] if form in PANELS else list(levels)
    kernels = {level: find_matmul(host, form, level, rounding=way.rounding) for level in caches}
    size = sum(n * form.row_bytes(k) for n, k in SHAPES)
    found = []
    for count in counts:
        times: dict[int | None, list[float]] = {level: [] for level in caches}
        for _ in range(repeats):
            for level, kernel in kernels.items():
                times[level].append(1e3 * _seconds(kernel, weights, count))
        for level, each in times.items():
            row: dict[str, Any] = {"format": form.name, "activations": way.activations}
            row |= {"rows": count, "level": level}
            row |= {"ms": median(each), "gb_per_s": size / median(each) / 1e6, "repeats": each}
            found.append(row)
    return found


def _weights(form: WeightFormat) -> list[Tensor]:
    import torch

    from sglang_dspark.backends.cpu.weight_formats import FLOAT32, pack

    generator = torch.Generator().manual_seed(0)
    plain = (torch.randn(n, k, generator=generator) for n, k in SHAPES)
    return [weight if form is FLOAT32 else pack(weight, form) for weight in plain]


def _seconds(kernel: NarrowMatmul, weights: Sequence[Tensor], count: int) -> float:
    import torch

    from sglang_dspark.backends.cpu.linear import narrow

    inputs = {k: torch.randn(count, k) for _, k in _LAYER}
    began = perf_counter()
    for weight in weights:
        narrow(kernel, inputs[weight.shape[1]], weight, threads=1)
    return perf_counter() - began


def _line(row: dict[str, Any]) -> str:
    way = "" if row["level"] is None else f", fetched into L{row['level']}"
    kind = f"{row['format']} x {row['activations']}"
    return f"{kind}, {row['rows']} rows{way}: {row['ms']:.1f} ms, {row['gb_per_s']:.0f} GB/s"
