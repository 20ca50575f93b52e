"""One token's attention over bfloat16 slots against torch's in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numba import njit

from sglang_dspark.evaluation.decode_attention import decode_attention
from sglang_dspark.float_ops import exp32, fma


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "longest", "dim"),
    [(1, 1, 1, 1, 8), (3, 6, 2, 17, 16), (5, 9, 3, 70, 64), (2, 4, 4, 33, 96)],
)
def test_each_row_sees_its_own_keys(
    rows: int, heads: int, kv_heads: int, longest: int, dim: int
) -> None:
    generator = torch.Generator().manual_seed(rows)
    cache = torch.randn(2, rows, kv_heads, longest + 5, dim, generator=generator).bfloat16()
    keys, values = cache[:, :, :, :longest]  # a view, as the slot cache gives
    query = 3 * torch.randn(rows, heads, dim, generator=generator)
    visible = torch.randint(1, longest + 1, (rows,), generator=generator)
    visible[0] = longest
    cache[:, torch.arange(rows), :, visible] = float("nan")  # positions beyond are not read

    out = decode_attention(query, keys, values, visible, scale=0.3)

    for r in range(rows):
        n, group = int(visible[r]), heads // kv_heads
        exact = F.scaled_dot_product_attention(
            query[r, :, None].double(),
            keys[r, :, :n].double().repeat_interleave(group, 0),
            values[r, :, :n].double().repeat_interleave(group, 0),
            scale=0.3,
        )[:, 0]
        torch.testing.assert_close(out[r].double(), exact, atol=2e-6, rtol=2e-6)


def test_exp_is_within_two_in_ten_million() -> None:
    x = np.linspace(-87, 88, 5001).astype(np.float32)
    found = np.array([exp32(each) for each in x], np.float64)
    np.testing.assert_allclose(found, np.exp(x.astype(np.float64)), rtol=2e-7)


def test_a_product_and_a_sum_are_rounded_once() -> None:
    fused, x = njit(lambda x, y, z: fma(x, y, z)), np.float32(1 + 2.0**-12)
    assert fused(x, x, np.float32(-1 - 2.0**-11)) == np.float32(2.0**-24)
