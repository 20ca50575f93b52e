"""The fused elementwise operators against SGLang's own torch forms, at odd shapes."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

from sglang_dspark.backends.cpu import fused_ops

SHAPES = [(1, 64), (6, 576), (7, 48), (48, 96), (0, 64), (300, 32)]


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_rms_norm_matches_native(rows: int, width: int) -> None:
    torch.manual_seed(rows)
    norm = RMSNorm(width, eps=1e-5)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2.0)
        x, residual = torch.randn(rows, width) * 3, torch.randn(rows, width)
        torch.testing.assert_close(fused_ops.rms_norm(norm, x), norm.forward_native(x))
        ours = fused_ops.rms_norm(norm, x, residual)
        theirs = norm.forward_native(x, residual)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected)


def test_rms_norm_takes_heads_and_strided_rows() -> None:
    norm = RMSNorm(16)
    packed = torch.randn(5, 100)
    heads = packed[:, :64].reshape(5, 4, 16)
    with torch.no_grad():
        torch.testing.assert_close(fused_ops.rms_norm(norm, heads), norm.forward_native(heads))
        strided = packed[:, 3:19]
        torch.testing.assert_close(fused_ops.rms_norm(norm, strided), norm.forward_native(strided))


@pytest.mark.parametrize("width", [16, 48])
def test_rms_norm_leaves_what_it_does_not_cover(width: int) -> None:
    norm = RMSNorm(48, var_hidden_size=width).to(torch.bfloat16)
    x = torch.randn(3, 48, dtype=torch.bfloat16)
    with torch.no_grad():
        out = fused_ops.rms_norm(norm, x)
    assert isinstance(out, torch.Tensor)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, norm.forward_native(x))


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_silu_and_mul_matches_native(rows: int, width: int) -> None:
    torch.manual_seed(rows)
    op = SiluAndMul()
    x = torch.randn(rows, 2 * width) * 20  # far into both saturated ends
    torch.testing.assert_close(fused_ops.silu_and_mul(op, x), op.forward_native(x))


@pytest.mark.parametrize("rows", [1, 6, 31, 300])
@pytest.mark.parametrize(("rotary_dim", "neox"), [(64, True), (32, True), (64, False)])
def test_rotary_matches_native(rows: int, rotary_dim: int, neox: bool) -> None:
    torch.manual_seed(rows)
    op = RotaryEmbedding(64, rotary_dim, 512, 10000.0, neox, torch.float32)
    positions = torch.randint(0, 512, (rows,))
    packed = torch.randn(rows, 64 * 8)  # query and key as slices of one projection
    query, key = packed[:, : 64 * 5], packed[:, 64 * 5 : 64 * 7]
    expected = op.forward_native(positions, query.clone(), key.clone())
    ours = fused_ops.rotary(op, positions, query, key)
    for mine, theirs in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    """Greedy drafts are compared with plain decoding: one row alone must give the same bits."""
    norm, gate = RMSNorm(576), SiluAndMul()
    x = torch.randn(6, 576)
    wide = torch.randn(6, 1536)
    with torch.no_grad():
        together = fused_ops.rms_norm(norm, x)
        alone = torch.cat([fused_ops.rms_norm(norm, x[i : i + 1]) for i in range(6)])
    assert torch.equal(together, alone)
    together = fused_ops.silu_and_mul(gate, wide)
    assert torch.equal(
        together, torch.cat([fused_ops.silu_and_mul(gate, wide[i : i + 1]) for i in range(6)])
    )
