"""Runs the grouped GEMM in Triton's interpreter over all shapes and formats; prints a report.

A process of its own: whether a kernel is interpreted is decided when triton is imported.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor

from sglang_dspark.experts.fp8 import quantise, quantise_activations
from sglang_dspark.kernels.grouped_gemm import (
    m_grouped_gemm_nt_contiguous,
    m_grouped_gemm_nt_masked,
)
from sglang_dspark.kernels.grouped_layout import GroupedOperands, MaskedOperands
from sglang_dspark.kernels.grouped_reference import (
    calc_diff,
    m_grouped_gemm_nt_contiguous_reference,
    m_grouped_gemm_nt_masked_reference,
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


def masked(given: GroupedOperands, shape: GroupedShape, slots: int) -> MaskedOperands:
    """The same rows, each expert's in its own slots; the free slots hold NaN."""

    def spread(rows: torch.Tensor) -> torch.Tensor:
        bits = rows.view(torch.uint8)
        nan = torch.full((1, rows.shape[1]), float("nan")).to(rows.dtype).view(torch.uint8)
        parts = bits[: sum(shape.counts)].split(list(shape.counts))
        padded = [torch.cat([p, nan.expand(slots - len(p), -1)]) for p in parts]
        return torch.stack(padded).view(rows.dtype)

    counts = torch.tensor(shape.counts, dtype=torch.int32)
    x_scale = None if given.x_scale is None else spread(given.x_scale)
    x, out = spread(given.x), given.out_dtype
    return MaskedOperands(x, given.weight, counts, x_scale, given.weight_scale, out)


def cases() -> Iterator[tuple[str, GroupedShape, GroupedOperands, MaskedOperands]]:
    """Every shape in every format, in both layouts."""
    for shape in grouped_shapes():
        for kind in FORMATS:
            for out in (torch.bfloat16, torch.float32):
                given = operands(shape, kind, out)
                name = f"{kind}, {out}, {shape.name}"
                yield name, shape, given, masked(given, shape, max(shape.counts) + 3)


def judged(out: Tensor, again: Tensor, expected: Tensor, used: Tensor, dtype: torch.dtype) -> dict:
    """used: which rows are. The control compares with the neighbours' rows."""
    return {
        "diff": calc_diff(out, expected),
        "shape": out.shape == expected.shape and out.dtype == dtype,
        "padding_zero": not out[~used].any().item(),
        "same_bits": torch.equal(out, again),
        "control": calc_diff(expected.roll(1, 0), expected),
    }


def main() -> None:
    report = {}
    for name, shape, rows, slots in cases():
        used = torch.arange(shape.rows) < sum(shape.counts)
        twice = [m_grouped_gemm_nt_contiguous(rows) for _ in range(2)]
        expected = m_grouped_gemm_nt_contiguous_reference(rows)
        report[f"contiguous, {name}"] = judged(*twice, expected, used, rows.out_dtype)
        used = torch.arange(slots.x.shape[1]) < slots.counts[:, None]
        twice = [m_grouped_gemm_nt_masked(slots) for _ in range(2)]
        expected = m_grouped_gemm_nt_masked_reference(slots)
        report[f"masked, {name}"] = judged(*twice, expected, used, slots.out_dtype)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
