"""Runs attention of verify windows in Triton's interpreter, in a process of its own: the
interpreter must be chosen before Triton is imported. Prints JSON. The argument: how many cases.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch

from sglang_dspark.benchmarks.window_attention import layer, upstream
from sglang_dspark.benchmarks.window_shapes import MOST, Attention, cases, difference
from sglang_dspark.kernels.window_attention import attend_triton
from sglang_dspark.kernels.window_tiling import window_tiling
from tests.kernels.interpreter import patch_language_once

SPLITS = ((1, 256), (2, 16), (4, 32), (8, 16), (8, 48))  # and the least tokens of a part


def wide(record: Any) -> Any:
    """The record with its tensors of BF16 in float32."""
    held = {k: v for k, v in vars(record).items() if isinstance(v, torch.Tensor)}
    return replace(record, **{k: v.float() for k, v in held.items() if v.is_floating_point()})


def peers() -> dict[str, float]:
    """Compare the benchmark's two implementations; count its slots, and windows with rows."""
    made = layer(2, 3, 20, (4, 2, 16), "cpu")
    # SGLang's kernel would multiply the bits of BF16 here.
    made = Attention(wide(made.windows), wide(made.context), made.rule)
    found, other = made.output(), made.output()
    attend_triton(*made, found)
    upstream(made, other)()
    rows = made.windows.starts.diff()
    return {
        "peer": difference(found, other),
        "slots": len(rows),
        "windows": int((rows > 0).sum()),
    }


def main(count: int) -> None:
    """Compare every case with the reference; how far the worst one of each type is off."""
    wrong, worst, merged, blocks = [], dict[str, float](), 0, 0
    for number, made in enumerate(cases(count)):
        if len(wrong) > 9:  # a fault need not be shown in every case
            break
        heads, kv_heads = made.windows.queries.shape[1], made.windows.keys.shape[1]
        size = max(made.windows.keys.shape[-1], made.windows.values.shape[-1])
        requests, longest = len(made.windows.starts) - 1, made.windows.longest
        chosen = window_tiling(requests, kv_heads, heads // kv_heads, longest, size, 1)
        splits, least = SPLITS[number // 2 % len(SPLITS)]
        tiling = replace(chosen, splits=splits, least=least, keys=(16, chosen.keys)[number % 2])
        tiling = replace(tiling, window=min(tiling.keys, tiling.window))
        found, expected = made.output(), made.expected()
        attend_triton(*made, found, tiling)
        off, dtype = difference(found, expected), found.dtype
        name = str(dtype).removeprefix("torch.")
        worst[name] = max(off, worst.get(name, 0.0))
        if not off <= MOST[dtype]:
            wrong.append(f"{number}, {name}, {made.rule}, {tiling}: {off}")
        merged += splits > 1 and int(made.context.starts.diff().max()) > least
        blocks = max(blocks, tiling.blocks)
    report = {"wrong": wrong, "worst": worst, "merged": merged, "blocks": blocks}
    print(json.dumps(report | peers()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    np.seterr(all="ignore")
    patch_language_once()
    main(int(sys.argv[1]))
