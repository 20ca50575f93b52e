"""Hold what the fast path of a decoder layer reads: addresses of weights, and sizes.

A `LayerSpec` is resolved from upstream's modules (layers/support.py), anew when weights are updated
(layers/models.py); layers/model.py runs a model's layers from it, layers/kernel.py does the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sglang_dspark.backends.cpu import linear
from sglang_dspark.backends.cpu.layers.kernel import Buffers
from sglang_dspark.backends.cpu.linear import NarrowMatmul

_FLOAT = torch.float32


@dataclass(frozen=True)
class Shape:
    """Widths of a layer: d hidden, H heads and Hkv KV heads of D dimensions, f in the MLP."""

    hidden: int
    heads: int
    kv_heads: int
    head: int
    mlp: int


@dataclass(frozen=True)
class Product:
    """x W^T for one weight [n, k]: its address and the threads that `linear.narrow` would take."""

    address: int
    n: int
    k: int
    threads: int


@dataclass(frozen=True)
class Norm:
    """One RMSNorm: address of the weight [d] and epsilon; address 0: no norm."""

    address: int
    epsilon: float


NO_NORM = Norm(0, 0.0)


@dataclass(frozen=True)
class Ending:
    """The norm behind the last layer; weight: [d], whose address it has."""

    norm: Norm
    weight: Tensor


@dataclass(frozen=True)
class LayerSpec:
    """What a layer's passes need and do not change while nothing in it is exchanged.

    norms: before attention, before the MLP, of the query and of the key heads. tensors: the
    layer's, whose memory stays allocated as long as addresses in it are used.
    """

    shape: Shape
    kernel: NarrowMatmul
    norms: tuple[Norm, Norm, Norm, Norm]
    qkv: Product
    o: Product
    gate_up: Product
    down: Product
    cos_sin: Tensor  # [positions, rotary]
    index: int  # of the layer in the pool's buffers, from the pool's start_layer
    scale: float
    causal: bool
    window: int
    tensors: tuple[Tensor, ...]


@lru_cache(maxsize=2 * linear.MAX_ROWS)
def buffers_for(shape: Shape, rows: int) -> Buffers:
    """The buffers for a number of rows; layers of a shape share them, as one runs at a time."""
    query_width, key_width = shape.heads * shape.head, shape.kv_heads * shape.head
    widths = (
        shape.hidden,
        query_width + 2 * key_width,
        query_width,
        2 * shape.mlp,
        shape.mlp,
        shape.hidden,
        shape.hidden,
        shape.hidden,
    )
    normed, qkv, attended, gate_up, activated, mixed, carried, entered = (
        whole[: rows * width].view(rows, width)
        for whole, width in zip(_backing(widths), widths, strict=True)
    )
    return Buffers(
        normed=normed.numpy(),
        qkv=qkv.numpy(),
        heads=qkv.view(rows, -1, shape.head).numpy(),
        attended=attended.view(rows, shape.heads, shape.head).numpy(),
        gate_up=gate_up.numpy(),
        activated=activated.numpy(),
        mixed=mixed.numpy(),
        carried=carried.numpy(),
        entered=entered.numpy(),
    )


@lru_cache(maxsize=8)
def _backing(widths: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.empty(linear.MAX_ROWS * width, dtype=_FLOAT) for width in widths)
