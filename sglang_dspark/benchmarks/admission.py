"""Times `admission` on a CUDA device against its torch reference and SGLang's operator: `python -m
sglang_dspark.benchmarks.admission`. Without such a device it says so and measures nothing.

Prints one JSON row a shape and peer: `{op, shape, ours_us, peer, peer_us}`, medians of CUDA-event
times. SGLang's operator (sglang/kernels/ops/speculative/dspark/dspark_schedule.py, 0.5.23) is found
by name; it takes confidences, knows no limits or weights, and leaves indptr to another launch.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.benchmarks.shapes import Batch, batch
from sglang_dspark.kernels.admission import admit_torch, admit_triton

SHAPES = ((1, 7), (16, 7), (64, 7), (256, 7), (256, 15), (1024, 7))
REPEATS = 200


def rows() -> list[dict[str, object]]:
    """Times of all shapes on the current CUDA device."""
    generator = np.random.default_rng(0)
    found: list[dict[str, object]] = []
    for requests, gamma in SHAPES:
        case = batch(generator, requests, gamma, turn=0, device="cuda")
        ours = microseconds(lambda case=case: admit_triton(*case))  # type: ignore[misc]
        row = {"op": "admission", "shape": [requests, gamma], "ours_us": ours}
        sort = microseconds(lambda case=case: admit_torch(*case))  # type: ignore[misc]
        found.append({**row, "peer": "torch sort", "peer_us": sort})
        try:
            theirs: dict[str, object] = {"peer_us": microseconds(upstream(case))}
        except Exception as error:
            theirs = {"peer_us": None, "reason": f"{type(error).__name__}: {error}"}
        found.append({**row, "peer": "SGLang ScheduleVerifyLensTopk"} | theirs)
    return found


def upstream(case: Batch) -> Callable[[], Tensor]:
    """SGLang's operator on confidences of the same logits, and the same K."""
    module = import_module("sglang.kernels.ops.speculative.dspark.dspark_schedule")
    planner = import_module("sglang.srt.speculative.dspark_components.dspark_planner")
    gamma = case.logits.shape[1]
    config = planner.DSparkScheduleConfig(gamma=gamma)

    def call() -> Tensor:
        lengths: Tensor = module.ScheduleVerifyLensTopk.execute(
            confidence=torch.sigmoid(case.logits.float()), budget=case.drafts, cfg=config
        )
        return lengths

    return call


def microseconds(call: Callable[[], object]) -> float:
    """Median time of a call between two CUDA events."""
    for _ in range(10):
        call()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def main() -> None:
    """Print the rows, or why there are none."""
    if not torch.cuda.is_available():
        print("no CUDA device here: this benchmark measures nothing on a CPU")
        return
    for row in rows():
        print(json.dumps(row))


if __name__ == "__main__":
    main()
