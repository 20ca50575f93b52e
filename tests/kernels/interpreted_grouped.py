"""Runs the grouped GEMM in Triton's interpreter over all shapes and formats; prints a report.

A process of its own: whether a kernel is interpreted is decided when triton is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "1"

import torch

from sglang_dspark.experts.fp8 import quantise, quantise_activations
from sglang_dspark.kernels.grouped_gemm import m_grouped_gemm_nt_contiguous
from sglang_dspark.kernels.grouped_layout import GroupedOperands
from sglang_dspark.kernels.grouped_reference import (
    calc_diff,
    m_grouped_gemm_nt_contiguous_reference,
)
from sglang_dspark.kernels.grouped_shapes import GroupedShape, grouped_shapes

FORMATS = ("bf16 x bf16", "bf16 x fp8", "fp8 x fp8")


def operands(shape: GroupedShape, kind: str, out_dtype: torch.dtype) -> GroupedOperands:
    """Random operands of a shape; padding rows hold NaN, which must not get anywhere."""
    generator = torch.Generator().manual_seed(len(shape.counts) + shape.inner)
    x = torch.randn(shape.rows, shape.inner, generator=generator).bfloat16()
    weight = torch.randn(len(shape.counts), shape.columns, shape.inner, generator=generator)
    weight *= 10 ** torch.randn(len(shape.counts), 1, 1, generator=generator)
    x_scale = weight_scale = None
    if kind == "bf16 x bf16":
        weight = weight.bfloat16()
    else:
        packed = quantise(weight)
        weight, weight_scale = packed.payload, packed.scales
    if kind == "fp8 x fp8":
        x, x_scale = quantise_activations(x)
        x_scale[sum(shape.counts) :] = float("nan")
    else:
        x[sum(shape.counts) :] = float("nan")
    return GroupedOperands(x, weight, shape.offsets(), x_scale, weight_scale, out_dtype)


def cases() -> Iterator[tuple[str, GroupedShape, GroupedOperands]]:
    for shape in grouped_shapes():
        for kind in FORMATS:
            for out in (torch.bfloat16, torch.float32):
                yield f"{kind}, {out}, {shape.name}", shape, operands(shape, kind, out)


def main() -> None:
    report: dict[str, dict[str, float | bool]] = {}
    for name, shape, given in cases():
        out = m_grouped_gemm_nt_contiguous(given)
        expected = m_grouped_gemm_nt_contiguous_reference(given)
        expected[sum(shape.counts) :] = 0
        again = m_grouped_gemm_nt_contiguous(given)
        shifted = expected.roll(1, 0)
        report[name] = {
            "diff": calc_diff(out, expected),
            "shape": out.shape == expected.shape and out.dtype == given.out_dtype,
            "padding_zero": not out[sum(shape.counts) :].any().item(),
            "same_bits": torch.equal(out, again),
            "control": calc_diff(shifted, expected),
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
