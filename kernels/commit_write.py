"""Write keys and values of a pass into all draft layers' caches in one launch (paper, 3.1.1).

One product gives the keys and values of every layer. The rest is a norm over each key's head,
its rotation by the row's position, and a row of each layer's two caches. A program does that for
one row and one layer, all heads at once, in float32. It checks the slot first: rows without one
(`NOWHERE`, or below), which fill a graph's size, are skipped.

Upstream (sglang/kernels/ops/speculative/dspark/fused_kv_write.py) has such a launch for
caches in bfloat16 whose sizes are powers of two; any other cache requires several calls a layer.

`write_torch` is the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dspark.kernels.rounding import narrowed

NOWHERE = 0  # the cache slot of no token
# Of the caches. Devices of compute capability 8.9 and above convert to E4M3.
TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
}
_FP8 = torch.float8_e4m3fn
_MOST_FP8 = 448.0


@dataclass(frozen=True)
class DraftLayers:
    """The caches of L draft layers of H key heads of D, and the parameters of their keys.

    keys, values: L tensors [slots, H, D] of one type; a slot is a contiguous row. norms: [L, D].
    scales: [L, 2] float32, divisors of keys and values. neox: whether the rotation pairs i
    with i + half; else 2i with 2i + 1.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    norms: Tensor
    scales: Tensor
    epsilon: float
    neox: bool = True

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return L, H, D."""
        return len(self.keys), self.keys[0].shape[1], self.keys[0].shape[2]

    @cached_property
    def table(self) -> Tensor:
        """Return [L, 4] int64: addresses of keys and values, their strides from slot to slot."""
        pairs = zip(self.keys, self.values, strict=True)
        rows = [[k.data_ptr(), v.data_ptr(), k.stride(0), v.stride(0)] for k, v in pairs]
        return torch.tensor(rows, dtype=torch.int64, device=self.norms.device)


def why_not(layers: DraftLayers, rotary: int) -> str | None:
    """Return the reason why `write_triton` cannot write these caches; None if it can.

    rotary: number of rotated dimensions of a head's D.
    """
    _, heads, size = layers.sizes
    dtype, device = layers.keys[0].dtype, layers.keys[0].device
    if dtype not in TYPES:
        return f"its cache holds {dtype}"
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9)
    if dtype is _FP8 and old:
        return "this device does not convert to FP8"
    for cache in (*layers.keys, *layers.values):
        if cache.shape[1:] != (heads, size) or cache.dtype is not dtype:
            return "its layers have caches of unlike rows"
        if cache.stride()[1:] != (size, 1):
            return "a token's row of its cache is not contiguous"
    if rotary % 2 or not 2 <= rotary <= size:
        return f"{rotary} of {size} numbers of a key are rotated"
    return None


def write_triton(
    layers: DraftLayers, projected: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor
) -> None:
    """Write the keys and values of N rows into all layers' caches.

    projected: [N, L * 2 * H * D], a layer's keys before its values, rows contiguous. cos_sin:
    [longest, rotary] of cosines, then sines. positions, slots: [N] int64; rows with a
    slot of 0 or below are skipped. Raises ValueError on unsupported shapes.
    """
    _check(layers, projected, cos_sin, positions, slots)
    count, heads, size = layers.sizes
    if not len(projected):
        return
    _write_kernel[(len(projected), count)](
        projected,
        layers.norms,
        layers.scales,
        cos_sin,
        positions,
        slots,
        layers.table,
        layers.epsilon,
        projected.stride(0),
        heads,
        size,
        cos_sin.shape[1],
        layers.neox,
        TYPES[layers.keys[0].dtype],
        triton.next_power_of_2(heads),
        triton.next_power_of_2(size),
        bool(triton.knobs.runtime.interpret),
    )


def write_torch(
    layers: DraftLayers, projected: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor
) -> None:
    """Compute the reference of `write_triton`: same arguments, same caches but for rounding."""
    _check(layers, projected, cos_sin, positions, slots)
    count, heads, size = layers.sizes
    kept = slots > NOWHERE
    places = slots[kept]
    both = projected[kept].float().view(-1, count, 2, heads, size)
    cosines, sines = cos_sin[positions[kept]].float()[:, None].chunk(2, -1)  # [n, 1, rotary / 2]
    for layer in range(count):
        key, value = both[:, layer].unbind(1)  # [n, H, D]
        inverse = torch.rsqrt(key.square().mean(-1, keepdim=True) + layers.epsilon)
        key = key * inverse * layers.norms[layer].float()
        key = _rotated(key, cosines, sines, layers.neox)
        caches = layers.keys[layer], layers.values[layer]
        for cache, row, scale in zip(caches, (key, value), layers.scales[layer], strict=True):
            scaled = row / scale
            if cache.dtype is _FP8:
                scaled = scaled.clamp(-_MOST_FP8, _MOST_FP8)
            _stored(cache)[places] = _stored(scaled.to(cache.dtype))


def _stored(cache: Tensor) -> Tensor:
    """View a cache as bytes where torch has no assignment by index."""
    return cache.view(torch.uint8) if cache.dtype is _FP8 else cache


def _rotated(key: Tensor, cosines: Tensor, sines: Tensor, neox: bool) -> Tensor:
    """Rotate key [n, H, D] by angles [n, 1, rotary / 2]."""
    half = cosines.shape[-1]
    turned, rest = key[..., : 2 * half], key[..., 2 * half :]
    if neox:
        first, second = turned.chunk(2, -1)
    else:
        first, second = turned[..., ::2], turned[..., 1::2]
    pair = (first * cosines - second * sines, second * cosines + first * sines)
    turned = torch.cat(pair, -1) if neox else torch.stack(pair, -1).flatten(-2)
    return torch.cat((turned, rest), -1)


def _check(
    layers: DraftLayers, projected: Tensor, cos_sin: Tensor, positions: Tensor, slots: Tensor
) -> None:
    count, heads, size = layers.sizes
    width = count * 2 * heads * size
    if projected.dim() != 2 or projected.shape[1] != width or projected.stride(1) != 1:
        raise ValueError(f"projected must be [N, {width}]: {tuple(projected.shape)}")
    rows = len(projected)
    for name, each in (("positions", positions), ("slots", slots)):
        if each.shape != (rows,) or each.dtype != torch.int64 or not each.is_contiguous():
            raise ValueError(f"{name} must be [{rows}] int64: {tuple(each.shape)}, {each.dtype}")
    if cos_sin.dim() != 2 or not cos_sin.is_contiguous():
        raise ValueError(f"cos_sin must be [longest, rotary], contiguous: {tuple(cos_sin.shape)}")
    if layers.norms.shape != (count, size) or layers.scales.shape != (count, 2):
        raise ValueError(
            f"{count} layers of heads of {size} need norms and scales for each: "
            f"{tuple(layers.norms.shape)}, {tuple(layers.scales.shape)}"
        )


@triton.jit  # type: ignore[untyped-decorator]
def _write_kernel(
    projected, norms, scales, cos_sin, positions, slots, table, epsilon, row_stride,
    heads: tl.constexpr, size: tl.constexpr, rotary: tl.constexpr, neox: tl.constexpr,
    dtype: tl.constexpr, head_block: tl.constexpr, size_block: tl.constexpr,
    interpreted: tl.constexpr,
):  # fmt: skip
    row, layer = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    if slot <= 0:
        return
    position = tl.load(positions + row)
    h, d = tl.arange(0, head_block)[:, None], tl.arange(0, size_block)[None, :]
    inside = (h < heads) & (d < size)
    turned = d < rotary
    half: tl.constexpr = rotary // 2
    if neox:
        second, angle = d >= half, d % half
        other = tl.where(second, d - half, d + half)
    else:
        second, angle, other = d % 2 == 1, d // 2, d ^ 1
    own = projected + row * row_stride + layer * (2 * heads * size) + h * size
    key = tl.load(own + d, mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(own + other, mask=inside & turned, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(key * key, 1) / size + epsilon)[:, None]
    weight = tl.load(norms + layer * size + d, mask=d < size, other=0.0).to(tl.float32)
    other_weight = tl.load(norms + layer * size + other, mask=turned, other=0.0).to(tl.float32)
    angles = cos_sin + position * rotary + angle
    cosine = tl.load(angles, mask=turned, other=1.0).to(tl.float32)
    sine = tl.load(angles + half, mask=turned, other=0.0).to(tl.float32)
    partner = partner * inverse * other_weight
    key = key * inverse * weight * cosine + tl.where(second, partner, -partner) * sine
    value = tl.load(own + heads * size + d, mask=inside, other=0.0).to(tl.float32)
    cache, scale = table + layer * 4, scales + layer * 2
    columns = h * size + d
    _store(cache, scale, slot, columns, key, inside, dtype, interpreted)
    _store(cache + 1, scale + 1, slot, columns, value, inside, dtype, interpreted)


@triton.jit  # type: ignore[untyped-decorator]
def _store(
    entry, scale, slot, columns, row, inside, dtype: tl.constexpr, interpreted: tl.constexpr
):
    """Store a token's row [heads, size] to the cache whose address is at `entry`."""
    row = tl.div_rn(row, tl.broadcast_to(tl.load(scale), row.shape))
    if dtype == tl.float8e4nv:
        row = tl.clamp(row, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    cache = tl.load(entry).to(tl.pointer_type(dtype))
    start = slot * tl.load(entry + 2)
    tl.store(cache + start + columns, narrowed(row, dtype, interpreted), mask=inside)
