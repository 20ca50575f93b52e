"""Estimate confidence in Triton's interpreter, which must be chosen before Triton is imported.

Prints JSON. The argument: number of steps.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np

from sglang_dspark.drafter.draft_confidence import draft_confidence
from sglang_dspark.kernels.certainty import certainty_triton
from tests.kernels.certainty_shapes import difference, drafts
from tests.kernels.interpreter import patch_language_once


def main(count: int) -> None:
    """Compare every step with the reference, and by other tilings."""
    worst, nans, sure, positions, tilings = 0.0, 0, 0, 0, 0.0
    for logits, temperatures in drafts(count, 0):
        found = certainty_triton(logits, temperatures, rows=16, block=256)
        expected = draft_confidence(logits, temperatures)
        worst = max(worst, difference(found, expected))
        tilings = max(tilings, difference(certainty_triton(logits, temperatures), found))
        nans += int(found.isnan().sum())
        sure += int((found > 16).sum())
        positions += found.numel()
    report = {"worst": worst, "tilings": tilings, "nan": nans, "sure": sure}
    print(json.dumps({**report, "positions": positions}))


if __name__ == "__main__":
    np.seterr(all="ignore")
    patch_language_once()
    main(int(sys.argv[1]))
