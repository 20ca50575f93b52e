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

GROUP = 64  # columns of a row that share a scale
PANEL = 16  # rows of int8 in one block
SCALES_BYTES = 4 * PANEL  # float32, at the start of a panel's group
GROUP_BYTES = SCALES_BYTES + PANEL * GROUP  # of a panel
SMALLEST_ROW = (
    2.0**-112
)  # of activations: one of smaller numbers becomes 0, its step has no inverse

_left: NDArray[np.uint8] = np.empty(0, np.uint8)  # the rest of the newest piece
_lock = threading.Lock()  # two weights at one address would raise no error


def huge_page_bytes(size: int) -> Tensor:
    """Allocate [size] uint8, uninitialised, with its own storage, at the start of a cache line."""
    global _left
    whole = -(-size // _LINE) * _LINE
    with _lock:
        if whole > len(_left):
            _left = _new_piece(max(PIECE, whole))
        taken, _left = _left[:size], _left[whole:]
    return torch.from_numpy(taken)


def _new_piece(size: int) -> NDArray[np.uint8]:
    """Map memory at the start of a huge page; pages are allocated when first written."""
    mapped = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        mapped.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError) as error:  # not Linux, or a kernel without huge pages
        logger.info("sglang-dspark: %d MiB of weights on ordinary pages: %s", size >> 20, error)
    memory = np.frombuffer(mapped, np.uint8)
    start = -memory.ctypes.data % PAGE
    return memory[start : start + size]


@kernel
def panel_rows(found, scales, total, together, flip, rows, out):  # type: ignore[no-untyped-def]
    """Write rows[i] of `total` to out[i]; return False, and write nothing, if a row is missing.

    found, scales: all panels as uint8 and as float32. together: neighbouring columns. flip: xor for
    a byte that makes it its number plus 128. rows [n] int64, out [n, K] float32. torch needs a
    dozen calls for this, about 50 us of a step.
    """
    for row in rows:
        if row < 0 or row >= total:
            return False
    groups = out.shape[1] // GROUP
    for i, row in enumerate(rows):
        lane = row % PANEL
        for g in range(groups):
            first = (row // PANEL * groups + g) * GROUP_BYTES
            scale = scales[first // 4 + lane]
            first += SCALES_BYTES + lane * together
            for c in range(GROUP):
                byte = found[first + c // together * PANEL * together + c % together]
                out[i, g * GROUP + c] = np.float32(np.int32(byte ^ flip) - 128) * scale
    return True


@dataclass(frozen=True)
class WeightFormat:
    """name: as in `cpu.weights`. columns: the kernel reads this many at a time; K is a multiple."""

    name: str
    dtype: torch.dtype
    columns: int

    def row_bytes(self, k: int) -> int:
        """Return the bytes from a row of K weights to the next; int8: with scales, averaged."""
        return k * self.dtype.itemsize + (k // GROUP * 4 if self.dtype.itemsize == 1 else 0)


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


def can_pack(weight: Tensor, form: WeightFormat) -> bool:
    """Return whether a weight [N, K] can be packed in a format."""
    n, k = weight.shape
    return n % 16 == 0 and k % form.columns == 0


def is_bfloat16(weight: Tensor) -> bool:
    """Return whether all float32 numbers are exact in bfloat16."""
    bits = weight.detach().contiguous().view(torch.int32)
    return not bool((bits & 0xFFFF).any())


def pack(weight: Tensor, form: WeightFormat) -> Tensor:
    """Pack a weight [N, K] float32 in a format, [N, K] of its dtype; return one it cannot pack."""
    n, k = weight.shape
    if form is FLOAT32 or not can_pack(weight, form):
        return weight
    weight = weight.detach()
    if form is BFLOAT16:
        return weight.to(form.dtype).contiguous()
    groups = weight.reshape(n, k // GROUP, GROUP)
    scales = groups.abs().amax(-1) / 127.0  # [N, K / 64]
    divisors = torch.where(scales > 0, scales, 1.0)
    whole = (groups / divisors[..., None]).round().clamp(-127, 127).to(torch.int8)
    return _laid_out(whole, scales, form.dtype)


def dense(weight: Tensor) -> Tensor:
    """Return the float32 numbers [N, K] that a weight represents; a float32 weight itself."""
    int8 = weight.dtype in _NEIGHBOURS
    return look_up(weight, torch.arange(len(weight))) if int8 else weight.float()


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
    form = format_of(weight)
    if len(rows) % PANEL and is_packed(weight):
        return look_up(weight, rows)
    return _laid_out(*int8_rows(weight, rows), form.dtype) if form in PANELS else weight[rows]


def look_up(weight: Tensor, tokens: Tensor) -> Tensor:
    """Look up embeddings: tokens [...] int64 -> [..., K] float32. Raises IndexError if missing."""
    if weight.dtype not in _NEIGHBOURS:
        return weight[tokens].float()
    rows, (total, k) = tokens.reshape(-1).to(torch.int64).contiguous(), weight.shape
    found = torch.empty(len(rows), k)
    panels = weight.as_strided((total // PANEL * (k // GROUP) * GROUP_BYTES,), (1,)).numpy()
    flip = np.uint8(128 if weight.dtype is torch.int8 else 0)  # uint8 is offset by 128
    if not panel_rows(
        panels.view(np.uint8), panels.view(np.float32), total, _NEIGHBOURS[weight.dtype], flip,
        rows.numpy(), found.numpy(),
    ):  # fmt: skip
        raise IndexError(f"rows {rows.min()} to {rows.max()} of a weight with {total} rows")
    return found.view(*tokens.shape, k)


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
