"""`dspark bench experts`: compare our expert kernels with others on this machine's GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def experts(
    tokens: Annotated[str, typer.Option(help="M, comma-separated.")] = "1,4,16,64,256,1024,4096",
    out: Annotated[
        Path | None, typer.Option(help="Result file. Default: results/experts_<device>.json.")
    ] = None,
) -> None:
    """Measure times, TFLOP/s, GB/s of expert layers; on a CPU only correctness, roofline plan."""
    import torch
    from rich.console import Console

    from sglang_dspark.benchmarks import experts as bench_experts

    console = Console(stderr=True, highlight=False)
    counts = _counts(tokens)
    if not torch.cuda.is_available():
        _without_device(console, counts)
        return
    from sglang_dspark.loadtest.results import write_results

    device = torch.cuda.get_device_name()
    diffs = bench_experts.correctness("cuda")
    rows: list[dict[str, Any]] = []
    for row in bench_experts.measured(bench_experts.Matrix(tokens=counts)):
        rows.append(row)
        console.print(_line(row))
    name = f"experts_{device.lower().replace(' ', '_')}"
    out = out or Path("results") / f"{name}.json"
    write_results(out, name, device, {"calc_diff": diffs, "rows": rows})
    console.print(f"written to {out}")


def _counts(text: str) -> tuple[int, ...]:
    from sglang_dspark.errors import DSparkError

    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise DSparkError(f"--tokens {text!r} is not a list of positive numbers such as 1,64,4096")
    return counts


def _line(row: dict[str, Any]) -> str:
    theirs = f"{row['peer_us']:.1f} us" if row["peer_us"] else f"- ({row['why']})"
    name, count, way = row["shape"]
    return (
        f"{row['op']}, {name}, {count} tokens {way}, {row['format']}: {row['ours_us']:.1f} us; "
        f"{row['peer']} {theirs}"
    )


def _without_device(console: Any, counts: tuple[int, ...]) -> None:
    from rich import box
    from rich.table import Table

    from sglang_dspark.benchmarks import experts as bench_experts
    from sglang_dspark.benchmarks.layers import NOMINAL_H100

    console.print("no CUDA device here: nothing is measured and no result file is written")
    for kind, diff in bench_experts.interpreted_correctness().items():
        console.print(f"{kind}: calc_diff {diff:.1e} against float64, in the interpreter")
    table = Table(title=f"Least time, {NOMINAL_H100.source}: a plan", box=box.SIMPLE_HEAD)
    table.add_column("layer", no_wrap=True, min_width=17)
    for name in ("tokens", "routing", "format", "experts", "least us", "bound"):
        table.add_column(name, justify="right")
    for row in bench_experts.plan(bench_experts.Matrix(tokens=counts), NOMINAL_H100):
        least = f"{row['least_us']:.1f}"
        parts = [str(row[key]) for key in ("layer", "tokens", "routing", "format", "experts")]
        table.add_row(*parts, least, row["bound"])
    console.print(table)
