"""Store served weights as float32, bfloat16, or int8 with a scale for each 64 columns.

A decode step reads every weight once, so fewer bytes are faster. A packed weight represents the
float32 numbers of `dense`. The matrix kernel (linear.py) multiplies bfloat16 with rows that are
also rounded (`half_rows`), or widens it to float32 in registers: the product is then bitwise
that with `dense(weight)`. int8 weights are multiplied in integers, with activations of eight bits
(`BYTES`, `rounded_groups`) or of sixteen (`INT8`, `rounded_rows`). All are batch-invariant.

int8 is symmetric: a weight is its byte times the scale of its group, which is the largest of the
group over 127. Sixteen rows form a panel, in the order that the kernel reads: for each group of
columns the sixteen scales, then, two or four neighbouring columns at a time, the bytes of each row.
The tensor has the shape of the weight that it represents, [N, K]; only its first address is used.

Panels are read as one stream, so they are allocated on huge pages: prefetchers stop at the end of
each page of 4 KiB (dev/LOG.md). Most weights are smaller than a huge page, so they share large
pieces, each freed with the last of its weights. bfloat16 rows are read at a stride, and huge pages
are slower for a single row.
"""

from __future__ import annotations

import logging
import mmap
import threading
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_dspark.backends.cpu.jit import kernel

logger = logging.getLogger(__name__)

PAGE = 2 << 20
PIECE = 32 * PAGE
_LINE = 64  # bytes of a cache line

_Memory = NDArray[np.uint8]


class _Pieces:
    """Memory pieces that weights share; holds the unused rest of the newest."""

    def __init__(self) -> None:
        self._left: _Memory = np.empty(0, np.uint8)
        self._lock = threading.Lock()  # two weights at one address would raise no error

    def take(self, size: int) -> _Memory:
        """Allocate bytes at the start of a cache line. Raises OSError if memory is exhausted."""
        whole = -(-size // _LINE) * _LINE
        with self._lock:
            if whole > len(self._left):
                self._left = _new_piece(max(PIECE, whole))
            taken, self._left = self._left[:size], self._left[whole:]
        return taken


def _new_piece(size: int) -> _Memory:
    """Map memory at the start of a huge page; pages are allocated when first written."""
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapped = mmap.mmap(-1, size + PAGE, flags=kind)
    try:
        mapped.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError) as error:  # not Linux, or a kernel without huge pages
        logger.info("sglang-dspark: %d MiB of weights on ordinary pages: %s", size >> 20, error)
    memory: _Memory = np.frombuffer(mapped, np.uint8)
    start = -memory.ctypes.data % PAGE
    return memory[start : start + size]


_pieces = _Pieces()


def huge_page_bytes(size: int) -> Tensor:
    """Allocate [size] uint8, uninitialised, with its own storage."""
    return torch.from_numpy(_pieces.take(size))


# Above this number of rows torch's own loops are as fast.
MOST_ROWS = 256


@kernel
def panel_rows(found, scales, total, layout, flip, rows, out):  # type: ignore[no-untyped-def]
    """Write rows[i] of `total` to out[i]; return False, and write nothing, if a row is missing.

    found, scales: all panels as uint8 and as float32. layout: rows of a panel, columns of a group,
    neighbouring columns, bytes of a panel's group. flip: xor for a byte that makes it its number
    plus 128. rows [n] int64, out [n, K] float32. torch needs a dozen calls for this, about 50 us of
    a step.
    """
    for i in range(rows.shape[0]):
        if rows[i] < 0 or rows[i] >= total:
            return False
    lanes, columns, together, step = layout
    groups = out.shape[1] // columns
    for i in range(rows.shape[0]):
        panel, lane = rows[i] // lanes, rows[i] % lanes
        for g in range(groups):
            first = (panel * groups + g) * step
            scale = scales[first // 4 + lane]
            first += 4 * lanes + lane * together
            for c in range(columns):
                byte = found[first + c // together * lanes * together + c % together]
                out[i, g * columns + c] = np.float32(np.int32(byte ^ flip) - 128) * scale
    return True


GROUP = 64  # columns of a row that share a scale
PANEL = 16  # rows of int8 in one block
_SCALE_BYTES = 4  # a scale is float32
SCALES_BYTES = PANEL * _SCALE_BYTES  # at the start of a panel's group
GROUP_BYTES = SCALES_BYTES + PANEL * GROUP  # of a panel
SMALLEST_ROW = (
    2.0**-112
)  # activations: a row of only smaller numbers becomes 0, as its step would have no inverse


@dataclass(frozen=True)
class WeightFormat:
    """name: as in `cpu.weights`. columns: the kernel reads this many at a time; K is a multiple."""

    name: str
    dtype: torch.dtype
    columns: int

    def row_bytes(self, k: int) -> int:
        """Return the bytes from a row of K weights to the next; int8: with scales, averaged."""
        scales = k // GROUP * _SCALE_BYTES if self.dtype.itemsize == 1 else 0
        return k * self.dtype.itemsize + scales


FLOAT32 = WeightFormat("float32", torch.float32, 16)
BFLOAT16 = WeightFormat("bfloat16", torch.bfloat16, 32)
INT8 = WeightFormat("int8", torch.int8, GROUP)
BYTES = WeightFormat("int8", torch.uint8, GROUP)  # the same numbers, for activations of eight bits
FORMATS = {form.name: form for form in (FLOAT32, BFLOAT16, INT8)}
PANELS = (INT8, BYTES)
_BY_DTYPE = {form.dtype: form for form in (*FORMATS.values(), BYTES)}
_NEIGHBOURS = {torch.int8: 2, torch.uint8: 4}  # columns whose bytes are adjacent in a panel
_OFFSET = 128  # of unsigned bytes


def format_of(weight: Tensor) -> WeightFormat | None:
    """Return the format of a weight [N, K] that the kernel can read in place; else None."""
    form = _BY_DTYPE.get(weight.dtype)
    if form is None or weight.dim() != 2 or not weight.is_cpu:
        return None
    step = form.row_bytes(weight.shape[1]) // form.dtype.itemsize
    readable = can_pack(weight, form) and weight.stride() == (step, 1)
    if form in PANELS:  # a slice from the middle of a panel is unreadable
        readable = readable and weight.storage_offset() % (PANEL * step) == 0
    return form if readable and type(weight) in (Tensor, torch.nn.Parameter) else None


def is_packed(weight: Tensor) -> bool:
    """Return whether a weight has fewer bytes than the float32 numbers it represents."""
    return format_of(weight) in (BFLOAT16, *PANELS)


def is_narrow(weight: Tensor) -> bool:
    """Return whether a float32 product requires `dense` of a weight: packed, or packed rows."""
    return is_packed(weight) or weight.dtype is torch.bfloat16


def can_pack(weight: Tensor, form: WeightFormat) -> bool:
    """Return whether a weight [N, K] can be packed in a format."""
    n, k = weight.shape
    return n % 16 == 0 and k % form.columns == 0


def is_bfloat16(weight: Tensor) -> bool:
    """Return whether all float32 numbers are exact in bfloat16."""
    bits = weight.detach().contiguous().view(torch.int32)
    return not bool((bits & 0xFFFF).any())


def pack(weight: Tensor, form: WeightFormat) -> Tensor:
    """Pack a weight [N, K] float32 in a format, [N, K] of its dtype.

    Raises ValueError where N is no multiple of 16 or K no multiple of the format's columns.
    """
    n, k = weight.shape
    if not can_pack(weight, form):
        raise ValueError(f"{form.name} takes [16 i, {form.columns} j] weights, not [{n}, {k}]")
    weight = weight.detach()
    if form not in PANELS:
        return weight.to(form.dtype).contiguous()
    groups = weight.reshape(n, k // GROUP, GROUP)
    scales = groups.abs().amax(-1) / 127.0  # [N, K / 64]
    divisors = torch.where(scales > 0, scales, 1.0)
    whole = (groups / divisors[..., None]).round().clamp(-127, 127).to(torch.int8)
    return _laid_out(whole, scales, form.dtype)


def dense(weight: Tensor) -> Tensor:
    """Return the float32 numbers [N, K] that a weight represents; a float32 weight itself."""
    if weight.dtype not in _NEIGHBOURS:
        return weight.float()
    return _numbers(*int8_rows(weight, torch.arange(weight.shape[0])))


def half_rows(x: Tensor) -> Tensor:
    """Round rows [..., K] float32 as a product with bfloat16 rounding does."""
    return x.bfloat16().float()


def rounded_rows(x: Tensor) -> Tensor:
    """Round rows [..., K] float32 as a product with an `INT8` weight does.

    32767 steps to a row's largest number; a row with NaN or infinity becomes NaN."""
    return _rounded(x, 32767.0)


def rounded_groups(x: Tensor) -> Tensor:
    """Round for a `BYTES` weight: 127 steps to the largest number of each 64 columns."""
    return _rounded(x.unflatten(-1, (-1, GROUP)), 127.0).flatten(-2)


def _rounded(x: Tensor, steps: float) -> Tensor:
    top = x.abs().amax(-1, keepdim=True)
    seen = top > SMALLEST_ROW
    whole = (x * torch.where(seen, torch.full_like(top, steps) / top, 0.0)).round()
    scale = torch.where(seen, top / steps, 0.0)
    return torch.where(top.isfinite(), whole * scale, torch.nan)


def take_rows(weight: Tensor, rows: Tensor) -> Tensor:
    """Copy rows of a weight in its format: rows [n] int64 -> [n, K].

    In float32 where a packed format does not support the number of rows."""
    if not is_packed(weight):
        return weight[rows]
    if len(rows) % PANEL:
        return look_up(weight, rows)
    if weight.dtype in _NEIGHBOURS:
        return _laid_out(*int8_rows(weight, rows), weight.dtype)
    return weight[rows]


def look_up(weight: Tensor, tokens: Tensor) -> Tensor:
    """Look up embeddings: tokens [...] int64 -> [..., K] float32. Raises IndexError if missing."""
    rows = tokens.reshape(-1)
    if weight.dtype not in _NEIGHBOURS:
        found = weight[rows].float()
    elif len(rows) > MOST_ROWS:
        found = _numbers(*int8_rows(weight, rows))
    else:
        total, k = weight.shape
        found = torch.empty(len(rows), k)
        layout = (PANEL, GROUP, _NEIGHBOURS[weight.dtype], GROUP_BYTES)
        size = total // PANEL * (weight.shape[1] // GROUP) * GROUP_BYTES
        panels = weight.as_strided((size,), (1,)).numpy()
        flip = np.uint8(128 if weight.dtype is torch.int8 else 0)  # uint8 is offset by 128
        rows = rows.to(torch.int64).contiguous()
        if not panel_rows(
            panels.view(np.uint8), panels.view(np.float32), total, layout, flip, rows.numpy(),
            found.numpy(),
        ):  # fmt: skip
            raise IndexError(f"rows {rows.min()} to {rows.max()} of a weight with {total} rows")
    return found.view(*tokens.shape, weight.shape[1])


def _laid_out(whole: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Lay out panels: whole [N, K / 64, 64] int8, scales [N, K / 64] float32 -> [N, K] dtype."""
    n, groups = scales.shape
    step = groups * GROUP_BYTES // PANEL
    memory = huge_page_bytes(n * step).view(dtype).view(n, step)
    weight = memory[:, : groups * GROUP]
    its_scales, its_bytes = _panels(weight)
    its_scales.copy_(scales.view(-1, PANEL, groups).transpose(1, 2))
    together = _NEIGHBOURS[dtype]
    placed = whole.view(-1, PANEL, groups, GROUP // together, together).permute(0, 2, 3, 1, 4)
    its_bytes.copy_(placed if dtype is torch.int8 else placed.short() + _OFFSET)
    return weight


def _panels(weight: Tensor) -> tuple[Tensor, Tensor]:
    """View an int8 weight's scales [N / 16, K / 64, 16] float32 and its bytes, in pairs or fours
    of columns [N / 16, K / 64, 64 / c, 16, c]."""
    n, k = weight.shape
    groups, together = k // GROUP, _NEIGHBOURS[weight.dtype]
    sizes, steps = (n // PANEL, groups, GROUP_BYTES), (groups * GROUP_BYTES, GROUP_BYTES, 1)
    memory = weight.as_strided(sizes, steps, weight.storage_offset())
    scales = memory[..., :SCALES_BYTES].view(torch.float32)
    return scales, memory[..., SCALES_BYTES:].unflatten(-1, (GROUP // together, PANEL, together))


def int8_rows(weight: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Read rows [n] int64 of an int8 weight: [n, K / 64, 64] int8, scales [n, K / 64]."""
    scales, found = _panels(weight)
    panel, lane = rows // PANEL, rows % PANEL
    whole = found[panel, :, :, lane].flatten(2)
    if weight.dtype is torch.uint8:
        whole = (whole.short() - _OFFSET).to(torch.int8)
    return whole, scales[panel, :, lane]


def _numbers(whole: Tensor, scales: Tensor) -> Tensor:
    """Multiply int8 [n, K / 64, 64] by scales [n, K / 64]: [n, K] float32."""
    return (whole.float() * scales[..., None]).flatten(1)
