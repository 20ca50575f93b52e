"""Pack the rows of emitted tokens for the draft's context (paper, 3.1.1).

The target's hidden states of a step are in window order, gamma + 1 rows a request. Only those of
emitted tokens become keys and values of the draft's layers. How many there are is known on the
device alone, but there are no more than the pass verified, R + K, which the host fixed before it
drafted. So one launch packs them, first request first, into R + K rows with their positions and
cache slots; what is left over is zeros for slot 0, which no request owns. Upstream
(sglang/srt/speculative/dspark_components/dspark_kv_inject.py) projects all R (gamma + 1).

`pack_torch` is the reference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

NOWHERE = 0  # the cache slot that is no token's
_BLOCK = 4096  # features of a program


class Packed(NamedTuple):
    """hidden: [N, F]. positions, slots: [N] int64 of each row in its request, in the cache."""

    hidden: Tensor
    positions: Tensor
    slots: Tensor


def pack_triton(hidden: Tensor, emitted: Tensor, lens: Tensor, slots: Tensor, rows: int) -> Packed:
    """The first emitted[r] rows of each window, packed into `rows`.

    hidden: [R (gamma + 1), F], rows contiguous. emitted: [R] integers, 0 to gamma + 1, together no
    more than `rows`: the others are skipped. lens: [R] integers, positions of the windows' first
    rows. slots: [R, gamma + 1] int64, contiguous.
    Raises ValueError on shapes that do not fit.
    """
    width = _width(hidden, emitted, lens, slots)
    features = hidden.shape[1]
    whole = slots.new_empty(2, rows, dtype=torch.int64)
    packed = Packed(hidden.new_empty(rows, features), whole[0], whole[1])
    block = min(_BLOCK, triton.next_power_of_2(features))
    _pack_kernel[(rows, triton.cdiv(features, block))](
        hidden,
        emitted,
        lens,
        slots,
        *packed,
        len(emitted),
        width,
        features,
        hidden.stride(0),
        lanes=triton.next_power_of_2(len(emitted)),
        block=block,
    )
    return packed


def pack_torch(hidden: Tensor, emitted: Tensor, lens: Tensor, slots: Tensor, rows: int) -> Packed:
    """The reference of `pack_triton`; same arguments, same result, on any device."""
    width = _width(hidden, emitted, lens, slots)
    ends = emitted.long().cumsum(0)  # [R]
    row = torch.arange(rows, device=hidden.device)
    taken = row < ends[-1]
    r = torch.searchsorted(ends, row, right=True).clamp(max=len(emitted) - 1)
    place = torch.where(taken, row - (ends - emitted)[r], 0)
    return Packed(
        torch.where(taken[:, None], hidden[r * width + place], 0),
        torch.where(taken, lens.long()[r] + place, 0),
        torch.where(taken, slots[r, place], NOWHERE),
    )


def _width(hidden: Tensor, emitted: Tensor, lens: Tensor, slots: Tensor) -> int:
    requests = len(emitted)
    if slots.dim() != 2 or len(slots) != requests or len(lens) != requests:
        raise ValueError(
            f"{requests} requests need as many lengths and windows of slots: "
            f"{tuple(lens.shape)}, {tuple(slots.shape)}"
        )
    width = slots.shape[1]
    if hidden.dim() != 2 or len(hidden) != requests * width or hidden.stride(1) != 1:
        raise ValueError(f"hidden must be [{requests * width}, F]: {tuple(hidden.shape)}")
    if slots.dtype != torch.int64 or not slots.is_contiguous():
        raise ValueError(f"slots must be int64, contiguous: {slots.dtype}")
    return width


@triton.jit(do_not_specialize=["requests"])  # type: ignore[untyped-decorator]
def _pack_kernel(
    hidden, emitted, lens, slots, packed, positions, packed_slots,
    requests, width, features, row_stride, lanes: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = tl.arange(0, lanes)
    counts = tl.load(emitted + lane, mask=lane < requests, other=0).to(tl.int64)
    ends = tl.cumsum(counts, 0)
    r = tl.sum((ends <= row).to(tl.int64), 0)  # requests that end before this row; lanes: all
    taken = row < tl.sum(counts, 0)
    place = row - tl.sum(tl.where(lane < r, counts, 0), 0)
    column = part * block + tl.arange(0, block)
    source = (r * width + place) * row_stride
    inside = column < features
    x = tl.load(hidden + source + column, mask=inside & taken, other=0.0)
    tl.store(packed + row * features + column, x, mask=inside)
    if part == 0:
        position = tl.load(lens + r, mask=taken, other=0).to(tl.int64)
        slot = tl.load(slots + r * width + place, mask=taken, other=0)
        tl.store(positions + row, tl.where(taken, position + place, 0))
        tl.store(packed_slots + row, slot)
