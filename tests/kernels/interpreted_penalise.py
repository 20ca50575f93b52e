"""Penalise steps in Triton's interpreter, which must be chosen before Triton is imported.

Prints JSON. The argument: number of steps.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from sglang_dspark.kernels.penalise import penalise_triton
from tests.kernels.interpreter import patch_language_once
from tests.kernels.penalise_shapes import steps


def main(count: int) -> None:
    """Compare every step with the reference, bit by bit but for the kind of NaN."""
    wrong, changed, forbidden, untouched = [], 0, 0, 0
    for number, given in enumerate(steps(count, 0)):
        expected, before = given.expected(), given.logits.clone()
        penalise_triton(*given)
        if not torch.equal(given.logits.nan_to_num(7.0), expected.nan_to_num(7.0)):
            wrong.append(f"step {number}")
        changed += int((given.logits != before).sum())
        forbidden += int((given.logits.isneginf() & ~before.isneginf()).sum())
        untouched += len(given.logits) - len(given.rows)
        if len(wrong) > 9:  # a fault need not be shown in every case
            break
    report = {"changed": changed, "forbidden": forbidden, "untouched": untouched, "wrong": wrong}
    print(json.dumps(report))


if __name__ == "__main__":
    patch_language_once()
    main(int(sys.argv[1]))
