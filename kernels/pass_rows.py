"""Index the rows of a ragged verify pass in one launch (paper, 3.2.2).

Request r verifies the rows indptr[r] to indptr[r + 1]: its anchor and its admitted drafts. A graph
also needs the windows of all its slots, with requests or not. Upstream makes both from verify
lengths by about thirty launches a step (`build_ragged_verify_window_triton` and `padded_to_bucket`,
sglang/kernels/ops/speculative/); at one request the device then waits for the host.

`rows_torch` is the reference.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 256  # rows of a program


class Windows(NamedTuple):
    """Windows of a graph's slots. lens: [slots] int32. indptr: [slots + 1] int32, their sums."""

    lens: Tensor
    indptr: Tensor


class PassRows(NamedTuple):
    """Rows of a pass of T tokens: positions, cache slots, token ids and places, each [T] int64.

    places: r (gamma + 1) + i for row i of request r, -1 for a row of no request. Such a row has
    position, slot and token 0. whole: windows whose lengths sum to T: the rows left by the requests
    are shared among the other slots, first slots first, or given to the last request if there are
    none. capped: the same with at most gamma + 1 rows a slot.
    """

    positions: Tensor
    slots: Tensor
    ids: Tensor
    places: Tensor
    whole: Windows
    capped: Windows


def rows_triton(
    indptr: Tensor,
    ids: Tensor,
    lens: Tensor,
    owners: Tensor,
    table: Tensor,
    tokens: int,
    slots: int,
) -> PassRows:
    """Index a pass of `tokens` rows, T >= indptr[R], in a graph of `slots` >= R requests.

    indptr: [R + 1] int32. ids: [R, gamma + 1] int64, anchors and drafts, contiguous. lens: [R]
    integers, position of each anchor. owners: [R] integers, the requests' rows of `table`: [rows,
    longest] integers, the cache slot of each position. Raises ValueError on shapes that do not fit.
    """
    requests, width = _sizes(indptr, ids, lens, owners, slots)
    rows = ids.new_empty(4, tokens)
    windows = indptr.new_empty(4 * slots + 2)
    lanes = triton.next_power_of_2(slots)
    _rows_kernel[(triton.cdiv(tokens, _BLOCK) + 1,)](
        indptr,
        ids,
        lens,
        owners,
        table,
        rows,
        windows,
        requests,
        tokens,
        slots,
        table.stride(0),
        width=width,
        block=_BLOCK,
        lanes=lanes,
        steps=lanes.bit_length(),
    )
    return _split(rows, windows, slots)


def rows_torch(
    indptr: Tensor,
    ids: Tensor,
    lens: Tensor,
    owners: Tensor,
    table: Tensor,
    tokens: int,
    slots: int,
) -> PassRows:
    """Compute the reference of `rows_triton`: same arguments, same result, on any device."""
    requests, width = _sizes(indptr, ids, lens, owners, slots)
    row = torch.arange(tokens, device=ids.device)
    taken = row < indptr[-1]
    r = torch.searchsorted(indptr[1:].contiguous(), row, right=True).clamp(max=requests - 1)
    i = torch.where(taken, row - indptr[r], 0)
    position = lens.long()[r] + i
    rows = torch.stack(
        [
            torch.where(taken, position, 0),
            torch.where(taken, table[owners.long()[r], position].long(), 0),
            torch.where(taken, ids[r, i], 0),
            torch.where(taken, r * width + i, -1),
        ]
    )
    whole = indptr.new_zeros(slots)
    whole[:requests] = indptr.diff()
    left, others = tokens - indptr[-1], slots - requests
    if others:
        at = torch.arange(others, device=ids.device)
        whole[requests:] = left // others + (at < left % others)
    else:
        whole[-1] += left
    ends = [
        torch.nn.functional.pad(each.cumsum(0), (1, 0)) for each in (whole, whole.clamp(max=width))
    ]
    windows = torch.cat([whole, ends[0], whole.clamp(max=width), ends[1]]).int()
    return _split(rows, windows, slots)


def _split(rows: Tensor, windows: Tensor, slots: int) -> PassRows:
    lens, indptr, capped, ends = windows.split([slots, slots + 1, slots, slots + 1])
    positions, cache, ids, places = rows.unbind()
    whole, most = Windows(lens, indptr), Windows(capped, ends)
    return PassRows(positions, cache, ids, places, whole, most)


def _sizes(
    indptr: Tensor, ids: Tensor, lens: Tensor, owners: Tensor, slots: int
) -> tuple[int, int]:
    requests, width = ids.shape
    if not len(indptr) - 1 == len(lens) == len(owners) == requests or slots < requests:
        raise ValueError(
            f"{requests} requests need as many windows, lengths and owners, and no fewer slots: "
            f"{len(indptr) - 1}, {len(lens)}, {len(owners)}, {slots}"
        )
    if indptr.dtype != torch.int32 or ids.dtype != torch.int64 or not ids.is_contiguous():
        raise ValueError(
            f"indptr must be int32 and ids int64, contiguous: {indptr.dtype}, {ids.dtype}"
        )
    return requests, width


@triton.jit(do_not_specialize=["requests", "tokens", "slots"])  # type: ignore[untyped-decorator]
def _rows_kernel(
    indptr, ids, lens, owners, table, rows, windows,
    requests, tokens, slots, table_stride,
    width: tl.constexpr, block: tl.constexpr, lanes: tl.constexpr, steps: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    total = tl.load(indptr + requests)
    if program == 0:
        _pad(indptr, windows, requests, tokens, slots, total, width, lanes)
    else:
        row = (program - 1) * block + tl.arange(0, block)
        inside = row < tokens
        taken = row < total
        r = _request_of(indptr, row, requests, block, steps)
        i = row - tl.load(indptr + r)
        position = tl.load(lens + r).to(tl.int64) + i
        owner = tl.load(owners + r).to(tl.int64)
        cache = tl.load(table + owner * table_stride + position, mask=taken, other=0).to(tl.int64)
        token = tl.load(ids + r * width + i, mask=taken, other=0)
        tl.store(rows + row, tl.where(taken, position, 0), mask=inside)
        tl.store(rows + tokens + row, cache, mask=inside)
        tl.store(rows + 2 * tokens + row, token, mask=inside)
        tl.store(rows + 3 * tokens + row, tl.where(taken, r * width + i, -1), mask=inside)


@triton.jit
def _request_of(indptr, row, requests, block: tl.constexpr, steps: tl.constexpr):
    """Return the request of each row [block]; for a row past the last, the last."""
    low = tl.zeros([block], dtype=tl.int32)  # the first request that ends after the row
    high = low + requests
    for _ in range(steps):
        middle = (low + high) // 2
        end = tl.load(indptr + tl.minimum(middle, requests - 1) + 1)
        goes_on = (low < high) & (end <= row)
        high = tl.where((low < high) & (end > row), middle, high)
        low = tl.where(goes_on, middle + 1, low)
    return tl.minimum(low, requests - 1).to(tl.int64)


@triton.jit
def _pad(indptr, windows, requests, tokens, slots, total, width, lanes: tl.constexpr):
    """Write the windows of all slots, whole and capped."""
    slot = tl.arange(0, lanes)
    real = slot < slots
    start = tl.load(indptr + slot, mask=slot < requests, other=0)
    own = tl.load(indptr + slot + 1, mask=slot < requests, other=0) - start
    left, others = tokens - total, slots - requests
    share = left // tl.maximum(others, 1)
    more = left - share * tl.maximum(others, 1)
    own = tl.where(slot < requests, own, share + (slot - requests < more).to(tl.int32))
    own += tl.where((others == 0) & (slot == requests - 1), left, 0)
    own = tl.where(real, own, 0)
    capped = tl.minimum(own, width)
    tl.store(windows + slot, own, mask=real)
    tl.store(windows + slots, 0)
    tl.store(windows + slots + 1 + slot, tl.cumsum(own, 0), mask=real)
    rest = windows + 2 * slots + 1
    tl.store(rest + slot, capped, mask=real)
    tl.store(rest + slots, 0)
    tl.store(rest + slots + 1 + slot, tl.cumsum(capped, 0), mask=real)
