"""`dspark bench trainer`: compare anchors per second of our trainer and another, paired."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_dspark.training.benchmark import TrainerShape


def trainer(
    repeats: Annotated[int, typer.Option(min=3, help="Pairs of steps.")] = 12,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads of both.")] = 1,
    precision: Annotated[
        list[str] | None,
        typer.Option(help="float32 or bfloat16 (products); repeat for both, which is the default."),
    ] = None,
    target: Annotated[str, typer.Option(help="Target directory, or `demo`.")] = "demo",
    out: Annotated[Path, typer.Option(help="Result file.")] = Path("results/trainer.json"),
) -> None:
    """Compare our training step with that of `speculators`, on the same tensors, interleaved."""
    import torch
    from rich.console import Console

    from sglang_dspark.cli._workload import target_dir
    from sglang_dspark.common.machine import cpu_description
    from sglang_dspark.errors import DSparkError
    from sglang_dspark.loadtest.results import require_clean, write_results
    from sglang_dspark.training import benchmark

    console = Console(stderr=True, highlight=False)
    names = precision or ["float32", "bfloat16"]
    if wrong := set(names) - {"float32", "bfloat16"}:
        raise DSparkError(f"--precision {', '.join(wrong)}: expected float32 or bfloat16")
    require_clean(out)
    torch.set_num_threads(threads)
    shape = benchmark.TrainerShape()
    found = _measured(names, target_dir(target, console), shape, repeats, console)
    metrics = {
        "peer": f"speculators {benchmark.peer_version()}, DSpark, sdpa attention, eager losses",
        "threads": threads,
        "shape": {**vars(shape), "anchors_per_step": shape.anchors_per_step},
        "by_precision": found,
    }
    write_results(out, "trainer", cpu_description(), metrics)
    console.print(f"written to {out}")
    print(json.dumps(found))


def _measured(
    names: Sequence[str], target: Path, shape: TrainerShape, repeats: int, console: Console
) -> dict[str, Any]:
    """Measure the pair of trainers in each precision, on one store of random states."""
    from sglang_dspark.training import benchmark

    found = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        benchmark.random_store(work / "store", target, shape)
        for name in names:
            ours = benchmark.our_trainer(work, target, shape, half=name == "bfloat16")
            peer = benchmark.PeerStep(ours, target, shape, half=name == "bfloat16")
            row = benchmark.paired(ours.train_step, peer, shape.anchors_per_step, repeats)
            console.print(
                f"{name}: {row['ours_anchors_per_s']:.0f} anchors/s, speculators "
                f"{row['peer_anchors_per_s']:.0f}: {row['ratio']['value']:.2f}x "
                f"({row['ratio']['low']:.2f}-{row['ratio']['high']:.2f})"
            )
            found[name] = row
    return found
