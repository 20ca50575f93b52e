"""How a served weight lies in memory: float32, bfloat16, or int8 with a scale for 64 columns.

A decode step reads every weight once, so bytes are time. A packed weight stands for float32
numbers, those of `dense`. The matrix kernel (narrow_matmul.py) widens bfloat16 to just these in
registers and goes on in float32: a product has the bits of the same product with `dense(weight)`.
Where weights are int8 it multiplies integers, with activations of sixteen bits (`rounded_rows`).
Either way a row's product is the same whatever shares the step.

int8 is symmetric: a weight is its byte times the scale of its group, which is the largest of the
group over 127.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 64  # columns of a row that share a scale
_SCALE_BYTES = 4  # a scale is float32
SMALLEST_ROW = 2.0**-124  # activations: a row of none larger is 0, its scale would be subnormal


@dataclass(frozen=True)
class WeightFormat:
    """name: as in `cpu.weights`. columns: the kernel takes so many at a time, K is a multiple."""

    name: str
    dtype: torch.dtype
    columns: int

    def row_bytes(self, k: int) -> int:
        """Bytes from one row of K weights to the next; of int8 the scales lie behind the row."""
        scales = k // GROUP * _SCALE_BYTES if self.dtype is torch.int8 else 0
        return k * self.dtype.itemsize + scales


FLOAT32 = WeightFormat("float32", torch.float32, 16)
BFLOAT16 = WeightFormat("bfloat16", torch.bfloat16, 32)
INT8 = WeightFormat("int8", torch.int8, GROUP)
FORMATS = {form.name: form for form in (FLOAT32, BFLOAT16, INT8)}
_BY_DTYPE = {form.dtype: form for form in FORMATS.values()}


def format_of(weight: Tensor) -> WeightFormat | None:
    """The format of a weight [N, K] that the kernel can read where it lies; None of any other."""
    form = _BY_DTYPE.get(weight.dtype)
    if form is None or weight.dim() != 2 or not weight.is_cpu:
        return None
    n, k = weight.shape
    step = form.row_bytes(k) // form.dtype.itemsize
    fits = k % form.columns == 0 and n % 16 == 0 and weight.stride() == (step, 1)
    return form if fits and type(weight) in (Tensor, torch.nn.Parameter) else None


def is_packed(weight: Tensor) -> bool:
    """Whether a weight is kept in fewer bytes than the float32 numbers it stands for."""
    return format_of(weight) in (BFLOAT16, INT8)


def fits(weight: Tensor, form: WeightFormat) -> bool:
    """Whether a weight [N, K] can be packed in a format."""
    n, k = weight.shape
    return n % 16 == 0 and k % form.columns == 0


def is_bfloat16(weight: Tensor) -> bool:
    """Whether float32 numbers are all bfloat16 ones: kept as such they lose nothing."""
    bits = weight.detach().contiguous().view(torch.int32)
    return not bool((bits & 0xFFFF).any())


def pack(weight: Tensor, form: WeightFormat) -> Tensor:
    """A weight [N, K] float32 in a format, [N, K] of its dtype.

    Raises ValueError where N is no multiple of 16 or K none of the format's columns.
    """
    n, k = weight.shape
    if not fits(weight, form):
        raise ValueError(f"{form.name} takes [16 i, {form.columns} j] weights, not [{n}, {k}]")
    weight = weight.detach()
    if form is not INT8:
        return weight.to(form.dtype).contiguous()
    groups = weight.reshape(n, k // GROUP, GROUP)
    scales = groups.abs().amax(-1) / 127.0  # [N, K / 64]
    divisors = torch.where(scales > 0, scales, 1.0)
    whole = torch.empty(n, form.row_bytes(k), dtype=torch.int8)
    whole[:, :k] = (groups / divisors[..., None]).round().clamp(-127, 127).view(n, k)
    whole[:, k:].view(torch.float32).copy_(scales)
    return whole[:, :k]


def dense(weight: Tensor) -> Tensor:
    """The float32 numbers [N, K] that a weight stands for; a float32 weight itself."""
    if weight.dtype is not torch.int8:
        return weight.float()
    n, k = weight.shape
    scales = _whole(weight)[:, k:].view(torch.float32)  # [N, K / 64]
    return (weight.float().reshape(n, k // GROUP, GROUP) * scales[..., None]).view(n, k)


def rounded_rows(x: Tensor) -> Tensor:
    """What rows [..., K] float32 are in a product with an int8 weight: 32767 steps to a row's
    largest number; not a number throughout where one of a row is none or infinite."""
    top = x.abs().amax(-1, keepdim=True)
    seen = top > SMALLEST_ROW
    whole = (x * torch.where(seen, torch.full_like(top, 32767.0) / top, 0.0)).round()
    scale = torch.where(seen, top / 32767.0, 0.0)
    return torch.where(top.isfinite(), whole * scale, torch.nan)


def take_rows(weight: Tensor, rows: Tensor) -> Tensor:
    """Some rows of a weight, in its format: rows [n] int64 -> [n, K]."""
    if weight.dtype is not torch.int8:
        return weight[rows]
    return _whole(weight)[rows][:, : weight.shape[1]]


def look_up(weight: Tensor, tokens: Tensor) -> Tensor:
    """Embeddings: tokens [...] int64 -> [..., K] float32."""
    rows = take_rows(weight, tokens.reshape(-1))
    return dense(rows).view(*tokens.shape, weight.shape[1])


def _whole(weight: Tensor) -> Tensor:
    """An int8 weight [N, K] with the scales behind its rows, [N, K + K / 16] int8."""
    n, k = weight.shape
    return weight.as_strided((n, INT8.row_bytes(k)), weight.stride(), weight.storage_offset())
