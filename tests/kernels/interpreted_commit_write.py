"""Runs the writing of accepted rows in Triton's interpreter, in a process of its own: the
interpreter must be chosen before Triton is imported. Prints JSON. The argument: how many launches.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from sglang_dspark.benchmarks.commit import stage
from sglang_dspark.benchmarks.commit_write_shapes import MOST, cases, copied, difference
from sglang_dspark.kernels.commit_write import write_torch, write_triton
from tests.kernels.interpreter import patch_language_once


def peers() -> dict[str, float]:
    """Compare caches after the benchmark's two implementations of one pass: how far off, in rows
    of emitted tokens, and rows that each wrote. Ours also writes the rejected ones."""
    made = stage(5, 3, (96, 48, 2, 4, 16), "cpu")
    other = replace(
        made,
        layers=replace(
            made.layers,
            keys=[each.clone() for each in made.layers.keys],
            values=[each.clone() for each in made.layers.values],
        ),
    )
    before = made.layers.keys[0].clone()
    made.ours()
    other.peer()(other.projected(other.windows(other.hidden)))
    emitted = (torch.arange(made.width) < made.emitted[:, None]).flatten()
    slots = made.windows(made.slots)[emitted]
    off = 0.0
    for name in ("keys", "values"):
        for a, b in zip(getattr(made.layers, name), getattr(other.layers, name), strict=True):
            a, b = a[slots].float(), b[slots].float()
            off = max(off, float(((a - b).abs().amax(-1) / b.abs().amax(-1)).max()))
    written = [int((each.layers.keys[0] != before).any(-1).any(-1).sum()) for each in (made, other)]
    return {
        "off": off,
        "ours": written[0],
        "rows": len(made.hidden),
        "peer": written[1],
        "emitted": int(made.emitted.sum()),
    }


def main(count: int) -> None:
    """Compare every launch; print the rows written and skipped, and each type's largest error."""
    wrong, written, left, worst = [], 0, 0, dict[str, float]()
    for number, given in enumerate(cases(count)):
        if len(wrong) > 9:  # a fault need not be shown in every case
            break
        expected = copied(given)
        write_triton(*given)
        write_torch(*expected)
        units = difference(given, expected)
        name = str(given.layers.keys[0].dtype).removeprefix("torch.")
        worst[name] = max(units, worst.get(name, 0.0))
        if not units <= MOST:
            wrong.append(f"{number}, {name}: {units}")
        written += len(given.layers.keys) * int((given.slots > 0).sum())
        left += len(given.layers.keys) * int((given.slots <= 0).sum())
    report = {"wrong": wrong, "rows": written, "left": left, "worst": worst}
    print(json.dumps({**report, "peers": peers()}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    patch_language_once()
    main(int(sys.argv[1]))
