"""Runs the kernels of the experts in Triton's interpreter over all shapes and formats; prints a
report.

A process of its own: whether a kernel is interpreted is decided when triton is imported.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dspark.benchmarks.grouped_shapes import (
    FORMATS,
    KINDS,
    GroupedShape,
    grouped_operands,
    grouped_shapes,
    random_weights,
)
from sglang_dspark.kernels import grouped_gemm as gemm
from sglang_dspark.kernels import grouped_reference as reference
from sglang_dspark.kernels.fp8_rows import fp8_rows
from sglang_dspark.kernels.grouped_layout import GroupedOperands
from sglang_dspark.kernels.grouped_moe import fused_experts, fused_experts_reference
from sglang_dspark.kernels.grouped_reference import calc_diff
from sglang_dspark.kernels.grouped_weights import e8m0, scaled_codes
from sglang_dspark.kernels.routing import route, route_torch, sum_pairs, sum_pairs_torch
from sglang_dspark.quantisation.fp8 import quantise_activations
from tests.kernels.interpreter import patch_language_once

Row = dict[str, float | bool]
AGAIN = ("decode, top-2 of 8", "unaligned everything", "padding behind")


def cases() -> Iterator[tuple[str, GroupedShape, GroupedOperands, Tensor]]:
    """Every shape, those of AGAIN in every format and the others in every second one; which rows
    are used."""
    for i, shape in enumerate(grouped_shapes()):
        for j, kind in enumerate(KINDS):
            if shape.name not in AGAIN and (i // 2 + j) % 2:
                continue
            out = (torch.bfloat16, torch.float32)[(i + j) % 2]
            rows = grouped_operands(shape, kind, out)
            used = torch.arange(shape.rows) < sum(shape.counts)
            yield f"{kind}, {out}, {shape.name}", shape, rows, used


def product(given: GroupedOperands) -> Tensor:
    return gemm.m_grouped_gemm_nt_contiguous(given)


def expected_product(given: GroupedOperands) -> Tensor:
    return reference.m_grouped_gemm_nt_contiguous_reference(given)


def judged(out: Tensor, again: Tensor, expected: Tensor, used: Tensor, dtype: torch.dtype) -> Row:
    """used: which rows are. The control compares with the neighbours' rows."""
    return {
        "diff": calc_diff(out, expected),
        "shape": out.shape == expected.shape and out.dtype == dtype,
        "padding_zero": not out[~used].any().item(),
        "same_bits": torch.equal(out, again),
        "control": calc_diff(expected.roll(1, 0), expected),
    }


def shared_differently(given: GroupedOperands) -> Tensor:
    """The same product by one program instead of three."""
    before = gemm._programs
    gemm._programs = lambda device, how: 1
    try:
        return product(given)
    finally:
        gemm._programs = before


def products() -> dict[str, Row]:
    report = {}
    for name, shape, given, used in cases():
        out = product(given)
        again = shared_differently(given) if shape.name in AGAIN else out
        report[name] = judged(out, again, expected_product(given), used, given.out_dtype)
    return report


def swiglus() -> dict[str, Row]:
    """SwiGLU, also to FP8."""
    report = {}
    for name, shape, given, used in cases():
        if shape.name != "unaligned everything":
            continue
        even = given.weight.shape[1] // 2 * 2
        scale = given.weight_scale
        if scale is not None:
            tall = -(-even // 128) if given.weight.dtype == gemm.FP8 else even
            scale = scale[:, :tall].contiguous()
        cut = replace(given, weight=given.weight[:, :even].contiguous(), weight_scale=scale)
        expected = reference.swiglu_reference(expected_product(cut))
        out = gemm.m_grouped_swiglu_nt_contiguous(cut).x
        report[name] = judged(out, out, expected, used, cut.out_dtype)
        values = reference.activation_values(*gemm.m_grouped_swiglu_nt_contiguous(cut, fp8=True))
        rounded = expected.clone()
        rounded[used] = through_fp8(expected[used])
        report[f"{name}, to fp8"] = judged(values, values, rounded, used, torch.float64)
    return report


def scatters() -> dict[str, Row]:
    """Rows to pairs and summed, and rows gathered by pairs, against the same in float64."""
    report = {}
    for name, shape, given, used in cases():
        if shape.name != "padding behind":
            continue
        generator = torch.Generator().manual_seed(1)
        places = shape.rows
        top_k = 3 if places % 3 == 0 else 1
        pairs = torch.randperm(places, generator=generator).int()
        weights = torch.rand(places // top_k, top_k, generator=generator)
        out = gemm.m_grouped_scatter_nt_contiguous(given, pairs, weights)
        full = expected_product(given)
        expected = reference.scatter_reference(full, pairs, weights, used)
        rows = torch.ones(len(out), dtype=torch.bool)
        report[name] = judged(out, out, expected, rows, given.out_dtype)
        back = torch.empty_like(pairs).scatter_(0, pairs.long(), torch.arange(places).int()).long()
        anywhere = given.x.view(torch.uint8)[back].view(given.x.dtype)
        scale = None if given.x_scale is None else given.x_scale[back]
        out = product(replace(given, x=anywhere, x_scale=scale, pairs=pairs))
        report[f"{name}, gathered"] = judged(out, out, full, used, given.out_dtype)
    return report


def routes() -> dict[str, bool]:
    """Sort and sum, bit for bit; FP8 rows as the format's own quantiser makes them."""
    generator = torch.Generator().manual_seed(0)
    report = {}
    for tokens, top_k, experts in ((0, 2, 3), (1, 1, 1), (1, 6, 64), (37, 2, 5), (700, 2, 9)):
        ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=generator)
        pairs = torch.randn(tokens, top_k, 1030, generator=generator).bfloat16()[:33]
        for kind in (ids, ids.int()):
            same = map(torch.equal, route(kind, experts), route_torch(kind, experts))
            report[f"route {tokens} x {top_k} to {experts}, {kind.dtype}"] = all(same)
        same = torch.equal(sum_pairs(pairs), sum_pairs_torch(pairs))
        report[f"sum {tokens} x {top_k}"] = same
    x = torch.randn(19, 200, generator=generator).bfloat16()
    x[3] = 0
    x[4, :5] *= 1e4
    (codes, scales), (wanted, exact) = fp8_rows(x), quantise_activations(x)
    off = (codes.float() - wanted.float()).abs()
    # Few of 3800 quotients, as 168.000002, are so near a tie that float32 puts them on it.
    near = (off <= wanted.float().abs() / 8).all() and (off > 0).sum() <= 10
    report["fp8 rows"] = bool(near) and torch.equal(scales, exact)
    return report


def through_fp8(rows: Tensor) -> Tensor:
    return reference.activation_values(*quantise_activations(rows))


def layers() -> dict[str, float]:
    """calc_diff of whole layers; some choices belong to another rank."""
    report = {}
    for tokens in (0, 1, 40):
        generator = torch.Generator().manual_seed(tokens)
        x = torch.randn(tokens, 96, generator=generator).bfloat16()
        ids = torch.randint(-1, 5, (tokens, 2), generator=generator)
        weights = torch.rand(tokens, 2, generator=generator)
        for form in FORMATS:
            gate_up = random_weights(generator, form, (5, 128, 96))
            down = random_weights(generator, form, (5, 96, 64))
            for fp8 in (False, True) if form != "bf16" else (False,):
                given = (x, ids, weights, gate_up, down)
                expected = fused_experts_reference(*given, through_fp8 if fp8 else Tensor.double)
                out = fused_experts(*given, fp8)
                diff = calc_diff(out, expected) if out.shape == x.shape else float("inf")
                report[f"{tokens} tokens, {form}{', fp8 rows' * fp8}"] = diff
    return report


@triton.jit
def _codes_kernel(fours, scales, out, count: tl.constexpr, groups: tl.constexpr):
    codes = tl.load(fours + tl.arange(0, count))[:, None]
    scale = e8m0(tl.load(scales + tl.arange(0, groups)), True)[None, :]
    codes, scale = tl.broadcast(codes, scale)
    parts = scaled_codes(codes, scale, True)
    place = tl.arange(0, count)[:, None] * groups + tl.arange(0, groups)[None, :]
    for j in tl.static_range(4):
        tl.store(out + j * count * groups + place, parts[j])


def codes() -> dict[str, bool]:
    """All 65536 fours of FP4 codes by 39 E8M0 scales, the extreme ones and NaN included, bit for
    bit."""
    fours = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).short()
    scales = torch.tensor(
        [*range(2, 250, 8), 0, 1, 127, 128, 129, 253, 254, 255], dtype=torch.uint8
    )
    scales = torch.cat([scales, scales[-(64 - len(scales)) :]])
    report = {}
    for first in range(0, 64, 16):
        some = scales[first : first + 16].contiguous()
        out = torch.empty(4, len(fours), 16)
        _codes_kernel[(1,)](fours, some, out, len(fours), 16)
        table = torch.tensor(reference.E2M1, dtype=torch.float64)
        factor = torch.ldexp(torch.ones(16).double(), some.int() - 127)
        factor = factor.masked_fill(some == 255, float("nan"))
        for j in range(4):
            wanted = (table[fours.int() >> 4 * j & 15][:, None] * factor).float()
            number = ~wanted.isnan()
            same = torch.equal(out[j].isnan(), ~number)
            same &= torch.equal(out[j][number].view(torch.int32), wanted[number].view(torch.int32))
            report[f"code {j}, scales from {first}"] = same
    return report


def joined() -> dict[str, Row]:
    """FP4 weights joined before the product, as Blackwell has them."""
    before = gemm._joins
    gemm._joins = lambda device: True
    try:
        return {
            name: judged(out := product(given), out, expected_product(given), used, given.out_dtype)
            for name, shape, given, used in cases()
            if shape.name == "unaligned everything" and "fp4" in name
        }
    finally:
        gemm._joins = before


def main() -> None:
    parts = (codes, joined, products, swiglus, scatters, routes, layers)
    json.dump({part.__name__: part() for part in parts}, sys.stdout)


if __name__ == "__main__":
    patch_language_once()
    main()
