"""The C++ operators: the same bits by every instruction set, the order of sums, missing memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from torch import Tensor

from sglang_dspark.backends.cpu import csrc, fused_ops, paged_attention
from sglang_dspark.backends.cpu.attention_plan import CACHED, make_plan
from tests.backends.cpu.operator_levels import LEVELS, force_level

pytestmark = pytest.mark.skipif(csrc.why_not() is not None, reason="no operators here")
WIDTHS = [1, 3, 16, 17, 48, 63, 64, 65, 130, 576, 601]


@pytest.fixture
def levels(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Iterator[str]]:
    """Return an iterator over instruction sets that sets each one in turn."""

    def each() -> Iterator[str]:
        for level in LEVELS:
            force_level(monkeypatch, fused_ops, level)
            force_level(monkeypatch, paged_attention, level)
            yield level

    return each


def assert_same(levels: Any, compute: Any) -> None:
    """Require the same bits of every level, NaN wherever one has NaN."""
    first: list[Tensor] | None = None
    for level in levels():
        found = compute()
        first = first or found
        for ours, theirs in zip(found, first, strict=True):
            assert torch.equal(ours.isnan(), theirs.isnan()), level
            assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0)), level


@torch.no_grad()
def rows(width: int, spoilt: bool) -> list[Tensor]:
    """Compute all row operators; spoilt: with infinite numbers and NaN."""
    torch.manual_seed(width)
    x, residual = torch.randn(3, width + 5)[:, :width], torch.randn(3, width) * 9
    wide, table = torch.randn(3, 2 * width) * 30, torch.randn(20, 2 * width)
    if spoilt:
        x[1, width // 2], residual[2, 0], wide[0, -1] = torch.inf, torch.nan, -torch.inf
    norm = RMSNorm(width, eps=1e-5)
    norm.weight.uniform_(-2.0, 2.0)
    found = [fused_ops.rms_norm(norm, x), *fused_ops.rms_norm(norm, x, residual)]
    found.append(fused_ops.silu_and_mul(SiluAndMul(), wide))
    rotary = RotaryEmbedding(2 * width, 2 * width, 20, 10000.0, True, torch.float32)
    rotary.cos_sin_cache = table
    found += fused_ops.rotary(rotary, torch.tensor([3, 0, 19]), wide.clone(), wide[:, :0].clone())
    heads = torch.randn(3, 4 * width)
    size, address = ctypes.c_int64, ctypes.c_void_p
    kinds = (address, size, size, size, size, address, ctypes.c_float)
    norm_heads = fused_ops.operator("rms_norm_heads", *kinds)
    assert norm_heads is not None
    weight = norm.weight.data_ptr()
    norm_heads(heads[:, width:].data_ptr(), 4 * width, 3, 2, width, weight, 1e-6)
    return [*found, heads]


@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_have_the_same_bits(levels: Any, width: int, spoilt: bool) -> None:
    assert_same(levels, partial(rows, width, spoilt))


def attended(dim: int, window: int, threads: int = 1) -> list[Tensor]:
    """Attend windows of several lengths."""
    torch.manual_seed(dim)
    found = []
    keys, values = torch.randn(2, 700, 2, dim).unbind()
    for queries, cached in ((1, 20), (6, 64), (6, 333), (70, 200)):
        table = torch.randperm(700).to(torch.int32)[None].expand(2, -1).contiguous()
        lens = [queries] * 2, [cached, cached + 7]
        plan = make_plan(table, torch.tensor([1, 0]), *lens)
        q = torch.randn(2 * queries, 9, dim)[:, 1:7]
        new = torch.randn(3, 2, dim), torch.randn(3, 5, dim)[:, 2:4], torch.tensor([9, 699, 0])
        out = torch.empty(2 * queries, 6, dim)
        paged_attention.paged_attention(
            q, keys, values, plan, scale=0.3, causal=True, window=window, threads=threads, out=out,
            new=new,
        )  # fmt: skip
        found.append(out)
    return [*found, keys.clone(), values.clone()]


@pytest.mark.parametrize("window", [paged_attention.NO_WINDOW, 20])
@pytest.mark.parametrize("dim", [1, 20, 64, 80])
def test_attention_has_the_same_bits(levels: Any, dim: int, window: int) -> None:
    assert_same(levels, partial(attended, dim, window))


@pytest.mark.parametrize("n", WIDTHS)
def test_a_sum_has_one_order(levels: Any, n: int) -> None:
    """64 lanes, then upper halves onto lower ones; seen in the norm of a row."""
    norm = RMSNorm(n, eps=0.0)
    x = torch.randn(1, n)
    lanes = np.zeros(64, np.float32)
    for chunk in np.pad(x[0].numpy() ** 2, (0, -n % 64)).reshape(-1, 64):
        lanes = lanes + chunk
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    one = np.float32(1.0)
    expected = x.numpy() * (one / np.sqrt(lanes / np.float32(n)))
    for _ in levels():
        with torch.no_grad():
            np.testing.assert_array_equal(fused_ops.rms_norm(norm, x).numpy(), expected)


def test_a_gate_is_within_five_in_ten_million() -> None:
    x = torch.linspace(-87, 88, 5001)
    found = fused_ops.silu_and_mul(SiluAndMul(), torch.cat([x, torch.ones_like(x)])[None])[0]
    torch.testing.assert_close(found.double(), x.double() * x.double().sigmoid(), rtol=5e-7, atol=0)


@pytest.mark.parametrize("threads", [1, 2])
def test_missing_memory_is_reported(threads: int) -> None:
    plan = make_plan(torch.zeros(1, 9, dtype=torch.int32), torch.zeros(2), [1, 1], [5, 5])
    plan.requests[:, CACHED] = 1 << 50  # no machine has memory for such scores
    rows = torch.zeros(2, 1, 16)
    with pytest.raises(MemoryError, match="no memory for its scores"):
        paged_attention.paged_attention(
            rows, rows, rows, plan, scale=1.0, causal=True, window=-1, threads=threads, out=rows
        )


@pytest.mark.parametrize("case", ["type", "strides", "cache", "slots"])
def test_other_arrays_are_rejected(case: str) -> None:
    plan = make_plan(torch.zeros(1, 9, dtype=torch.int32), torch.zeros(1), [1], [5])
    q, cache, out = torch.zeros(1, 2, 16), torch.zeros(9, 2, 16), torch.zeros(1, 2, 16)
    slots = torch.zeros(1, dtype=torch.int32 if case == "slots" else torch.int64)
    if case == "type":
        q = q.double()
    elif case == "strides":
        q = torch.zeros(1, 2, 32)[:, :, ::2]
    elif case == "cache":
        cache = torch.zeros(9, 3, 16)[:, :2]
    with pytest.raises(TypeError, match=r"contiguous|torch\.float64"):
        paged_attention.paged_attention(
            q, cache, cache, plan, scale=1.0, causal=True, window=-1, threads=1, out=out,
            new=(q, q, slots),
        )  # fmt: skip
