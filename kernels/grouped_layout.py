"""Operands of the grouped GEMMs, what must hold between them, and ragged groups cut into tiles."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

SCALE_BLOCK = 128
FP8 = torch.float8_e4m3fn
NO_TILE = -1


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
        _check_product(self)
        rows, experts = self.x.shape[0], self.weight.shape[0]
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


@dataclass(frozen=True)
class MaskedOperands:
    """Arguments of an M-grouped masked product; all tensors contiguous, on one device.

    x: [E, C, K], C slots for the rows of each expert. counts: [E] int32 in 0..C, slots in use, the
    first ones; what the others hold is not looked at. The rest as in `GroupedOperands`, x_scale
    being [E, C, ceil(K/128)].
    """

    x: Tensor
    weight: Tensor
    counts: Tensor
    x_scale: Tensor | None = None
    weight_scale: Tensor | None = None
    out_dtype: torch.dtype = torch.bfloat16

    def check(self) -> None:
        """Raise ValueError, in one line, where the operands do not fit each other."""
        _require(self.x.dim() == 3, f"x is {tuple(self.x.shape)}, expected [E, C, K]")
        _check_product(self)
        experts, slots = self.x.shape[:2]
        own = self.weight.shape[0]
        _require(experts == own, f"x has {experts} experts, weight has {own}")
        found = self.counts
        _require(
            tuple(found.shape) == (experts,) and found.dtype == torch.int32,
            f"counts are {tuple(found.shape)} {found.dtype}, expected [{experts}] int32",
        )
        if found.device.type == "cpu":
            listed = found.tolist()
            fits = all(0 <= count <= slots for count in listed)
            _require(fits, f"counts {listed} are not within the {slots} slots of an expert")


def _check_product(given: GroupedOperands | MaskedOperands) -> None:
    """What both layouts ask of rows, weights and scales."""
    x, weight = given.x, given.weight
    _require(weight.dim() == 3, f"weight is {tuple(weight.shape)}, not [E, N, K]")
    (*rows, inner), (experts, columns, k) = x.shape, weight.shape
    _require(k == inner, f"x has K = {inner}, weight has K = {k}")
    _require(experts >= 1 and inner >= 1, f"{experts} experts of input width {inner}")
    pair = (x.dtype, weight.dtype)
    known = ((torch.bfloat16, torch.bfloat16), (torch.bfloat16, FP8), (FP8, FP8))
    _require(pair in known, f"no product of {pair[0]} activations with {pair[1]} weights")
    outs = (torch.bfloat16, torch.float32)
    _require(given.out_dtype in outs, f"out_dtype {given.out_dtype} is none of {outs}")
    wide, deep = -(-columns // SCALE_BLOCK), -(-inner // SCALE_BLOCK)
    _check_scale("x_scale", x, given.x_scale, (*rows, deep))
    _check_scale("weight_scale", weight, given.weight_scale, (experts, wide, deep))
    places = given.offsets if isinstance(given, GroupedOperands) else given.counts
    for part in (
        p for p in (x, weight, places, given.x_scale, given.weight_scale) if p is not None
    ):
        _require(part.is_contiguous(), "an operand is not contiguous: call .contiguous()")
        _require(part.device == x.device, f"operands on {part.device}, {x.device}")


class Tiles(NamedTuple):
    """What each program of a launch does, all int32 on the device.

    expert [tiles]: whose rows; NO_TILE: nothing to do. first_row [tiles]. ends, limits [groups]:
    rows of a group before its end are multiplied, those from there to its limit become zero.
    """

    expert: Tensor
    first_row: Tensor
    ends: Tensor
    limits: Tensor


def contiguous_tiles(offsets: Tensor, rows: int, block_m: int) -> Tiles:
    """Cut the groups and the padding behind them into tiles of `block_m` rows, on their device.

    The padding is a group of its own that ends where it begins. There are rows // block_m + E + 1
    tiles, enough for any offsets: each of the E + 1 groups has at most one tile that is not full.
    """
    groups = len(offsets)  # E and the padding
    limits = torch.cat([offsets[1:], torch.full_like(offsets[:1], rows)])
    needed = (limits - offsets + block_m - 1) // block_m
    last = torch.cumsum(needed, 0, dtype=torch.int32)
    tile = torch.arange(rows // block_m + groups, dtype=torch.int32, device=offsets.device)
    expert = torch.searchsorted(last, tile, right=True, out_int32=True)
    own = expert.clamp(max=groups - 1).long()
    first = offsets[own] + (tile - last[own] + needed[own]) * block_m
    ends = torch.cat([offsets[1:], offsets[-1:]])
    return Tiles(expert.masked_fill(expert == groups, NO_TILE), first, ends, limits)


def masked_tiles(counts: Tensor, slots: int, block_m: int) -> Tiles:
    """Tiles of E x C slots laid end to end; their number does not depend on the counts."""
    each = -(-slots // block_m)
    tile = torch.arange(len(counts) * each, dtype=torch.int32, device=counts.device)
    expert = tile // each
    starts = torch.arange(len(counts), dtype=torch.int32, device=counts.device) * slots
    return Tiles(expert, expert * slots + tile % each * block_m, starts + counts, starts + slots)


def _require(ok: bool, what: str) -> None:
    if not ok:
        raise ValueError(f"grouped GEMM: {what}")


def _check_scale(name: str, tensor: Tensor, scale: Tensor | None, shape: tuple[int, ...]) -> None:
    if tensor.dtype != FP8:
        _require(scale is None, f"{name} given for {tensor.dtype}, which has no scales")
        return
    found = None if scale is None else (tuple(scale.shape), scale.dtype)
    _require(found == (shape, torch.float32), f"{name} is {found}, expected {shape} float32")
