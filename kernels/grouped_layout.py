"""Define the operands of the grouped GEMMs, and check their constraints."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

SCALE_BLOCK = 128  # FP8: weights that share a scale, both ways; activations, along a row
FP8 = torch.float8_e4m3fn
FP4_GROUPS = {"mxfp4": 32, "nvfp4": 16}  # weights along a row that share a scale
E8M0_NAN = 255


class Weights(NamedTuple):
    """Weights of all experts in one of the formats, as `GroupedOperands` describes them."""

    weight: Tensor
    weight_scale: Tensor | None = None
    weight_global: Tensor | None = None


@dataclass(frozen=True)
class GroupedOperands:
    """Arguments of an M-grouped contiguous product; all tensors contiguous, on one device.

    x: [M, K] bfloat16 or float8_e4m3fn, rows sorted by expert; or, with pairs, [T, K] in any order.
    weight, weight_scale, weight_global, by format (N out, K in):
      bf16: [E, N, K] bfloat16.
      fp8: [E, N, K] float8_e4m3fn; [E, ceil(N/128), ceil(K/128)] float32.
      mxfp4: [E, N, K/2] uint8, the even column in the low four bits; [E, N, K/32] uint8 (E8M0).
      nvfp4: [E, N, K/2] uint8; [E, N, K/16] float8_e4m3fn; [E] float32.
    offsets: [E+1] int32, group e is rows offsets[e]..offsets[e+1]; offsets[0] is 0, rows from
    offsets[E] on are padding. x_scale: [M, ceil(K/128)] float32, for FP8 rows, which require
    quantised weights. out_dtype: bfloat16 or float32. pairs: [M] int32, row i of the product is
    that of x[pairs[i] // top_k]; as `routing.route` returns it.
    """

    x: Tensor
    weight: Tensor
    offsets: Tensor
    x_scale: Tensor | None = None
    weight_scale: Tensor | None = None
    out_dtype: torch.dtype = torch.bfloat16
    weight_global: Tensor | None = None
    pairs: Tensor | None = None
    top_k: int = 1

    @property
    def rows(self) -> int:
        """Return M."""
        return len(self.x if self.pairs is None else self.pairs)

    def check(self) -> None:
        """Raise ValueError, in one line, if the operands do not fit each other."""
        _require(self.x.dim() == 2, f"x is {tuple(self.x.shape)}, expected [M, K]")
        _check_product(self)
        if self.pairs is not None:
            self._check_pairs(self.pairs)
        experts = self.weight.shape[0]
        found = self.offsets
        _require(
            tuple(found.shape) == (experts + 1,) and found.dtype == torch.int32,
            f"offsets are {tuple(found.shape)} {found.dtype}, expected [{experts + 1}] int32",
        )
        if found.device.type == "cpu":
            listed = found.tolist()
            ordered = all(a <= b for a, b in pairwise(listed))
            _require(
                ordered and listed[0] == 0 and listed[-1] <= self.rows,
                f"group offsets {listed} do not rise from 0 to at most {self.rows}",
            )

    def _check_pairs(self, pairs: Tensor) -> None:
        wanted = (len(self.x) * self.top_k,)
        _require(
            tuple(pairs.shape) == wanted and pairs.dtype == torch.int32 and pairs.is_contiguous(),
            f"pairs are {tuple(pairs.shape)} {pairs.dtype}, expected {wanted} int32, contiguous",
        )


def weight_format(given: GroupedOperands | Weights) -> str:
    """Return `bf16`, `fp8`, `mxfp4` or `nvfp4`, by the dtypes of weight and scale.

    Raises ValueError for other dtypes.
    """
    codes, scale = given.weight.dtype, given.weight_scale
    if codes == torch.bfloat16:
        return "bf16"
    if codes == FP8:
        return "fp8"
    if codes == torch.uint8 and scale is not None and scale.dtype in (torch.uint8, FP8):
        return "mxfp4" if scale.dtype == torch.uint8 else "nvfp4"
    found = "no scale" if scale is None else f"{scale.dtype} scale"
    raise ValueError(f"grouped GEMM: {codes} weights with {found} are no known format")


def check_routed(pairs: Tensor, weights: Tensor, rows: int) -> None:
    """Raise ValueError unless pairs, one a row, and weights [T, top_k] fit the rows."""
    fits = tuple(pairs.shape) == (rows,) and pairs.dtype == torch.int32 and pairs.is_contiguous()
    _require(fits, f"pairs are {tuple(pairs.shape)} {pairs.dtype}, expected ({rows},) int32")
    _require(
        weights.dim() == 2 and weights.dtype == torch.float32 and weights.is_contiguous(),
        f"routing weights are {tuple(weights.shape)} {weights.dtype}, expected [T, top_k] float32",
    )
    _require(
        weights.numel() == pairs.numel(),
        f"{weights.numel()} routing weights for {pairs.numel()} rows",
    )


def _check_product(given: GroupedOperands) -> None:
    """Check the rows, weights and scales."""
    x, weight = given.x, given.weight
    _require(weight.dim() == 3, f"weight is {tuple(weight.shape)}, not [E, N, K]")
    format_ = weight_format(given)
    experts, _, width = weight.shape
    k = width * 2 if format_ in FP4_GROUPS else width
    inner = x.shape[-1]
    _require(k == inner, f"x has K = {inner}, weight has K = {k}")
    _require(experts >= 1 and inner >= 1, f"{experts} experts of input width {inner}")
    known = x.dtype == torch.bfloat16 or (x.dtype == FP8 and format_ != "bf16")
    _require(known, f"no product of {x.dtype} activations with {format_} weights")
    outs = (torch.bfloat16, torch.float32)
    _require(given.out_dtype in outs, f"out_dtype {given.out_dtype} is none of {outs}")
    deep = (*x.shape[:-1], -(-inner // SCALE_BLOCK))
    _check_scale("x_scale", given.x_scale, deep if x.dtype == FP8 else None, torch.float32)
    _check_weight_scales(given, format_, inner)
    scales = (given.x_scale, given.weight_scale, given.weight_global)
    for part in (p for p in (x, weight, given.offsets, *scales) if p is not None):
        _require(part.is_contiguous(), "an operand is not contiguous: call .contiguous()")
        _require(part.device == x.device, f"operands on {part.device}, {x.device}")
    if weight.device.type == "cpu":
        _check_values(given, format_)


def _check_weight_scales(given: GroupedOperands, format_: str, inner: int) -> None:
    experts, columns, _ = given.weight.shape
    scale: tuple[int, ...] | None = None
    dtype = torch.float32
    if format_ == "fp8":
        scale = (experts, -(-columns // SCALE_BLOCK), -(-inner // SCALE_BLOCK))
    elif format_ in FP4_GROUPS:
        group = FP4_GROUPS[format_]
        _require(inner % group == 0, f"{format_} weights of width {inner}, no multiple of {group}")
        scale = (experts, columns, inner // group)
        dtype = torch.uint8 if format_ == "mxfp4" else FP8
    _check_scale("weight_scale", given.weight_scale, scale, dtype)
    overall = (experts,) if format_ == "nvfp4" else None
    _check_scale("weight_global", given.weight_global, overall, torch.float32)


def _check_values(given: GroupedOperands, format_: str) -> None:
    """Require finite weights and scales, where reading them costs no synchronisation."""
    for name in ("weight", "weight_scale", "weight_global"):
        part = getattr(given, name)
        if part is None or (part.dtype == torch.uint8 and name == "weight"):
            continue
        bad = part == E8M0_NAN if part.dtype == torch.uint8 else ~part.float().isfinite()
        _require(not bad.any(), f"{int(bad.sum())} values of {name} are NaN or infinite")


def _require(ok: object, what: str) -> None:
    if not ok:
        raise ValueError(f"grouped GEMM: {what}")


def _check_scale(
    name: str, scale: Tensor | None, shape: tuple[int, ...] | None, dtype: torch.dtype
) -> None:
    if shape is None:
        _require(scale is None, f"{name} given for operands of a type which has no scales")
        return
    found = None if scale is None else (tuple(scale.shape), scale.dtype)
    _require(found == (shape, dtype), f"{name} is {found}, expected {shape} {dtype}")
