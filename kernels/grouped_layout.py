"""Operands of the grouped GEMMs, what must hold between them, and ragged groups cut into tiles."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

SCALE_BLOCK = 128
FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class GroupedOperands:
    """Arguments of an M-grouped contiguous product; all tensors contiguous, on one device.

    x: [M, K] bfloat16 or float8_e4m3fn, rows sorted by expert. weight: [E, N, K] of either dtype.
    offsets: [E+1] int32, group e is rows offsets[e]..offsets[e+1]; offsets[0] is 0, rows from
    offsets[E] on are padding. x_scale: [M, ceil(K/128)], weight_scale: [E, ceil(N/128),
    ceil(K/128)], float32, for the FP8 ones. out_dtype: bfloat16 or float32.
    """

    x: Tensor
    weight: Tensor
    offsets: Tensor
    x_scale: Tensor | None = None
    weight_scale: Tensor | None = None
    out_dtype: torch.dtype = torch.bfloat16

    def check(self) -> None:
        """Raise ValueError, in one line, where the operands do not fit each other."""
        _require(self.x.dim() == 2, f"x is {tuple(self.x.shape)}, expected [M, K]")
        _require(self.weight.dim() == 3, f"weight is {tuple(self.weight.shape)}, not [E, N, K]")
        (rows, inner), (experts, columns, k) = self.x.shape, self.weight.shape
        _require(k == inner, f"x has K = {inner}, weight has K = {k}")
        _require(experts >= 1 and inner >= 1, f"{experts} experts of input width {inner}")
        pair = (self.x.dtype, self.weight.dtype)
        known = ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, FP8), (FP8, FP8))
        _require(pair in known, f"no product of {pair[0]} activations with {pair[1]} weights")
        outs = (torch.bfloat16, torch.float32)
        _require(self.out_dtype in outs, f"out_dtype {self.out_dtype} is none of {outs}")
        wide, deep = -(-columns // SCALE_BLOCK), -(-inner // SCALE_BLOCK)
        _check_scale("x_scale", self.x, self.x_scale, (rows, deep))
        _check_scale("weight_scale", self.weight, self.weight_scale, (experts, wide, deep))
        self._check_offsets(rows, experts)
        parts = (self.x, self.weight, self.offsets, self.x_scale, self.weight_scale)
        for part in (p for p in parts if p is not None):
            _require(part.is_contiguous(), "an operand is not contiguous: call .contiguous()")
            _require(part.device == self.x.device, f"operands on {part.device}, {self.x.device}")

    def _check_offsets(self, rows: int, experts: int) -> None:
        found = self.offsets
        _require(
            tuple(found.shape) == (experts + 1,) and found.dtype == torch.int32,
            f"offsets are {tuple(found.shape)} {found.dtype}, expected [{experts + 1}] int32",
        )
        if found.device.type == "cpu":
            listed = found.tolist()
            ordered = all(a <= b for a, b in pairwise(listed))
            _require(
                ordered and listed[0] == 0 and listed[-1] <= rows,
                f"group offsets {listed} do not rise from 0 to at most {rows}",
            )


class Tiles(NamedTuple):
    """expert [tiles] int32: whose rows; E: padding rows; E+1: nothing to do. first_row [tiles]
    int32. ends [E+1] int32: end of each group, then M."""

    expert: Tensor
    first_row: Tensor
    ends: Tensor


def tiles_of(offsets: Tensor, rows: int, block_m: int) -> Tiles:
    """Cut the groups and the padding behind them into tiles of `block_m` rows, on their device.

    There are rows // block_m + E + 1 tiles, which is enough for any offsets: each of the E + 1
    groups has at most one tile that is not full.
    """
    groups = len(offsets)  # E and the padding
    ends = torch.cat([offsets[1:], torch.full_like(offsets[:1], rows)])
    counts = ends - offsets
    last = torch.cumsum((counts + block_m - 1) // block_m, 0, dtype=torch.int32)
    tile = torch.arange(rows // block_m + groups, dtype=torch.int32, device=offsets.device)
    expert = torch.searchsorted(last, tile, right=True, out_int32=True)  # groups: no such tile
    own = expert.clamp(max=groups - 1).long()
    before = last[own] - (counts[own] + block_m - 1) // block_m
    return Tiles(expert, offsets[own] + (tile - before) * block_m, ends)


def _require(ok: bool, what: str) -> None:
    if not ok:
        raise ValueError(f"grouped GEMM: {what}")


def _check_scale(name: str, tensor: Tensor, scale: Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor.dtype != FP8:
        _require(scale is None, f"{name} given for {tensor.dtype}, which has no scales")
        return
    found = None if scale is None else (tuple(scale.shape), scale.dtype)
    _require(found == (shape, torch.float32), f"{name} is {found}, expected {shape} float32")
