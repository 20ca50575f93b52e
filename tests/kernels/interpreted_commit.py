"""Runs the packing of accepted rows in Triton's interpreter, in a process of its own: the
interpreter must be chosen before Triton is imported. Prints JSON. The argument: how many windows.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from sglang_dspark.benchmarks.commit_shapes import windows
from sglang_dspark.kernels.commit_rows import Packed, pack_torch, pack_triton
from tests.kernels.interpreter import patch_language_once


def main(count: int) -> None:
    """Compare every case; requests, and cases with rows left over, all taken, and too few."""
    wrong, requests, kinds = [], 0, [0, 0, 0]
    for number, given in enumerate(windows(count)):
        if len(wrong) > 9:  # a fault need not be shown in every case
            break
        found, expected = pack_triton(*given), pack_torch(*given)
        wrong += [
            f"{number}, {name}"
            for name, mine, other in zip(Packed._fields, found, expected, strict=True)
            if not torch.equal(mine, other)
        ]
        requests += len(given.emitted)
        left = given.rows - int(given.emitted.sum())
        kinds[(left > 0) + 2 * (left < 0)] += 1
    exact, spare, cut = kinds
    report = {"exact": exact, "spare": spare, "cut": cut, "requests": requests}
    print(json.dumps({**report, "wrong": wrong}))


if __name__ == "__main__":
    patch_language_once()
    main(int(sys.argv[1]))
