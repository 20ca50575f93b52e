"""Times `admission` on a CUDA device against its torch reference: `python -m
sglang_dspark.benchmarks.admission`. Without such a device it says so and measures nothing.

Prints one JSON row a shape: `{op, shape, ours_us, peer, peer_us}`, medians of CUDA-event times.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from sglang_dspark.benchmarks.shapes import batch
from sglang_dspark.kernels.admission import admit_torch, admit_triton

SHAPES = ((1, 7), (16, 7), (64, 7), (256, 7), (256, 15), (1024, 7))
REPEATS = 200


def rows() -> list[dict[str, object]]:
    """Times of all shapes on the current CUDA device."""
    generator = torch.Generator().manual_seed(0)
    found: list[dict[str, object]] = []
    for requests, gamma in SHAPES:
        case = batch(generator, requests, gamma, turn=0, device="cuda")
        found.append(
            {
                "op": "admission",
                "shape": [requests, gamma],
                "ours_us": microseconds(lambda case=case: admit_triton(*case)),  # type: ignore[misc]
                "peer": "torch sort",
                "peer_us": microseconds(lambda case=case: admit_torch(*case)),  # type: ignore[misc]
            }
        )
    return found


def microseconds(call: Callable[[], Tensor]) -> float:
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
