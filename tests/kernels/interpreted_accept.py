"""Runs the accept kernel in Triton's interpreter, in a process of its own: the interpreter must be
chosen before Triton is imported. Prints JSON: parity with the pure rules, p-values of its law, bytes.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from sglang_dspark.benchmarks.accept_shapes import step, steps
from sglang_dspark.kernels.accept_sampled import Tiling, accept_triton
from tests.kernels.accept_reference import reference, undecided

TILINGS = (Tiling(8, 256), Tiling(16, 1024), Tiling(2, 64), Tiling(1, 256))
LARGE = ((129, 5, 33), (260, 7, 17), (300, 3, 101), (257, 6, 11))


def parity(count: int, seed: int) -> dict[str, object]:
    """Every step by one of the tilings, and some large ones; counters are shared by all."""
    arrivals = torch.zeros(300, dtype=torch.int32)
    generator = torch.Generator().manual_seed(seed + 1)
    report = {"requests": 0, "undecided": 0, "kept": 0, "rejected": 0}
    wrong = []
    cases = [(f"step {i}", given, TILINGS[i % 4]) for i, given in enumerate(steps(count, seed))]
    for i, shape in enumerate(LARGE * 4):
        cases.append((f"large {i}", step(generator, *shape, turn=3 * i + 1), Tiling(128, 64)))
    for name, given, how in cases:
        found, expected = accept_triton(given, arrivals, how), reference(given)
        near = undecided(given, expected)
        same = (found.accepted == expected.accepted) & (found.bonus == expected.bonus)
        wrong += [f"{name}, request {r}" for r in (~same & ~near).nonzero()[:, 0].tolist()]
        report["requests"] += len(near)
        report["undecided"] += int(near.sum())
        report["kept"] += int(expected.accepted.sum())
        report["rejected"] += int((expected.accepted < given.lengths).sum())
    return {**report, "wrong": wrong, "arrivals": int(arrivals.abs().sum())}


def main() -> None:
    """What the arguments ask for."""
    torch.set_num_threads(1)
    np.seterr(all="ignore")  # lanes behind a row's end
    print(json.dumps(parity(int(sys.argv[1]), 0)))


if __name__ == "__main__":
    main()
