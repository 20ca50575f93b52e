"""Indexes passes in Triton's interpreter, in a process of its own: the interpreter must be chosen
before Triton is imported. Prints JSON. The argument: how many passes.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from sglang_dspark.kernels.pass_rows import PassRows, rows_torch, rows_triton
from tests.kernels.interpreter import patch_language_once
from tests.kernels.pass_row_shapes import passes


def tensors(rows: PassRows) -> list[Tensor]:
    """All tensors of the rows, in order."""
    return [rows.positions, rows.slots, rows.ids, rows.places, *rows.whole, *rows.capped]


def main(count: int) -> None:
    """Compare every pass with the reference; print the first that differ, and what was compared."""
    wrong, requests, spare, full = [], 0, 0, 0
    for number, given in enumerate(passes(count)):
        found, expected = tensors(rows_triton(*given)), tensors(rows_torch(*given))
        wrong += [
            f"pass {number}, tensor {at}"
            for at, (mine, other) in enumerate(zip(found, expected, strict=True))
            if not torch.equal(mine, other)
        ]
        if len(wrong) > 9:  # a fault need not be shown in every case
            break
        requests += len(given.ids)
        spare += given.tokens > int(given.indptr[-1])
        full += given.slots == len(given.ids)
    print(json.dumps({"requests": requests, "spare": spare, "full": full, "wrong": wrong}))


if __name__ == "__main__":
    patch_language_once()
    main(int(sys.argv[1]))
