"""A decoder layer as nine kernel calls, everything that does not change resolved beforehand.

Adapts `LlamaDecoderLayer.forward` of sglang/srt/models/llama.py and `DFlashDecoderLayer.forward` of
models/dflash.py (0.5.23), which differ in the norms of query and key heads. With a handful of rows
SGLang's modules, boundaries and linear wrappers cost more than a small layer's arithmetic besides
the products; here a layer keeps the addresses, weights and buffers it needs (`LeanLayer`, resolved
by lean_fit.py), and a pass what its layers share (`Step`, lean_stack.py). The kernels and their
arguments are those of the ordinary path, so are the bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sglang_dspark.serving.cpu import fused_ops, linear
from sglang_dspark.serving.cpu.narrow_matmul import NarrowMatmul
from sglang_dspark.serving.cpu.plan import AttentionPlan

_FLOAT = torch.float32

Matrix = NDArray[Any]


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
    """One RMSNorm: weight [d] and epsilon."""

    weight: Matrix
    epsilon: float


@dataclass(frozen=True)
class Watched:
    """A parameter or buffer `owner[name]` whose address was resolved; `owner`: a module's dict."""

    owner: Mapping[str, Any]
    name: str
    tensor: Tensor
    address: int

    @property
    def unchanged(self) -> bool:
        now = self.owner.get(self.name)
        return now is self.tensor and self.tensor.data_ptr() == self.address


@dataclass(frozen=True)
class LeanLayer:
    """What a layer's passes need and do not change while `unchanged` holds.

    head_norms: of the query and key heads, where the model has them.
    parts: modules that LoRA and the like may exchange, as (owner's dict, name, module).
    """

    shape: Shape
    kernel: NarrowMatmul
    first_norm: Norm
    second_norm: Norm
    head_norms: tuple[Norm, Norm] | None
    qkv: Product
    o: Product
    gate_up: Product
    down: Product
    cos_sin: Matrix
    index: int  # of the layer in the pool's buffers, from the pool's start_layer
    scale: float
    causal: bool
    window: int
    parts: tuple[tuple[Mapping[str, Any], str, nn.Module], ...]
    tensors: tuple[Watched, ...]

    @property
    def unchanged(self) -> bool:
        """Whether no module and no parameter was exchanged or moved since it was resolved."""
        for owner, name, module in self.parts:
            if owner.get(name) is not module:
                return False
        return all(watched.unchanged for watched in self.tensors)


@dataclass(frozen=True)
class Room:
    """Buffers of n rows between a layer's kernels, as arrays and, where needed, addresses.

    query, key and value are views of qkv [n, (H + 2 Hkv) D]: `flat_*` [n, heads * D], else
    [n, heads, D]. mixed [n, d] holds what a layer adds to carried [n, d], entered [n, d] the sum of
    both of the layer before.
    """

    rows: int
    block: int
    normed: Matrix  # [n, d]
    normed_at: int
    qkv: Matrix
    qkv_at: int
    flat_query: Matrix
    flat_key: Matrix
    query: Matrix
    key: Matrix
    value: Matrix
    attended: Matrix  # [n, H, D]
    attended_at: int
    gate_up: Matrix  # [n, 2 f]
    gate_up_at: int
    activated: Matrix  # [n, f]
    activated_at: int
    mixed: Matrix
    mixed_at: int
    carried: Matrix
    entered: Matrix
    keep: tuple[Tensor, ...]


@dataclass(frozen=True)
class Step:
    """What the layers of one pass share: rows' positions and pool slots [n] int64, plan, kernel."""

    plan: AttentionPlan
    positions: Matrix
    slots: Matrix
    keys: Sequence[Tensor]  # the pool's buffers, one a layer, [slots, Hkv, D]
    values: Sequence[Tensor]
    first_layer: int  # number of the pool's first layer
    attend: Any


def run(lean: LeanLayer, step: Step, room: Room, hidden: Matrix, residual: Matrix | None) -> Matrix:
    """One layer: hidden [n, d], the last layer's output, still to be added to residual [n, d].

    Leaves the output in room.mixed and the residual to add it to in room.carried, which `hidden`
    and `residual` may be. Returns the residual after the first addition [n, d]: room.entered, or
    `hidden` itself without a residual, being the embedding then.
    """
    norm = lean.first_norm
    entered = hidden
    if residual is None:
        fused_ops.rms_norm_rows(hidden, norm.weight, norm.epsilon, room.normed)
    else:
        entered = room.entered
        fused_ops.add_rms_norm_rows(
            hidden, residual, norm.weight, norm.epsilon, entered, room.normed
        )
    _attend(lean, step, room)
    _multiply(lean, lean.o, room, room.attended_at, room.mixed_at)
    norm = lean.second_norm
    fused_ops.add_rms_norm_rows(
        room.mixed, entered, norm.weight, norm.epsilon, room.carried, room.normed
    )
    _multiply(lean, lean.gate_up, room, room.normed_at, room.gate_up_at)
    fused_ops.silu_and_mul_rows(room.gate_up, room.activated)
    _multiply(lean, lean.down, room, room.activated_at, room.mixed_at)
    return entered


def _attend(lean: LeanLayer, step: Step, room: Room) -> None:
    """room.attended from room.normed; K and V go to the pool."""
    _multiply(lean, lean.qkv, room, room.normed_at, room.qkv_at)
    shape = lean.shape
    if lean.head_norms is not None:
        query, key = lean.head_norms
        fused_ops.rms_norm_heads(room.qkv, 0, shape.heads, query.weight, query.epsilon)
        fused_ops.rms_norm_heads(room.qkv, shape.heads, shape.kv_heads, key.weight, key.epsilon)
    fused_ops.rotate_rows(step.positions, lean.cos_sin, room.flat_query, room.flat_key, shape.head)
    index, plan = lean.index - step.first_layer, step.plan
    step.attend(
        room.query, step.keys[index].numpy(), step.values[index].numpy(), room.key, room.value,
        step.slots, plan.table, plan.requests, plan.trees, lean.scale, lean.causal, lean.window,
        room.attended,
    )  # fmt: skip


def _multiply(lean: LeanLayer, product: Product, room: Room, source: int, target: int) -> None:
    lean.kernel.call(
        source,
        product.k,
        room.rows,
        room.block,
        product.address,
        product.n,
        product.k,
        target,
        product.threads,
    )


@lru_cache(maxsize=1024)
def room_of(shape: Shape, rows: int) -> Room:
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
    backing = _backing(widths)
    normed, qkv, attended, gate_up, activated, mixed, carried, entered = (
        whole[: rows * width].view(rows, width)
        for whole, width in zip(backing, widths, strict=True)
    )
    query, key, value = qkv.split([query_width, key_width, key_width], dim=-1)
    return Room(
        rows=rows,
        block=linear.block_rows(rows),
        normed=normed.numpy(),
        normed_at=normed.data_ptr(),
        qkv=qkv.numpy(),
        qkv_at=qkv.data_ptr(),
        flat_query=query.numpy(),
        flat_key=key.numpy(),
        query=query.view(rows, shape.heads, shape.head).numpy(),
        key=key.view(rows, shape.kv_heads, shape.head).numpy(),
        value=value.view(rows, shape.kv_heads, shape.head).numpy(),
        attended=attended.view(rows, shape.heads, shape.head).numpy(),
        attended_at=attended.data_ptr(),
        gate_up=gate_up.numpy(),
        gate_up_at=gate_up.data_ptr(),
        activated=activated.numpy(),
        activated_at=activated.data_ptr(),
        mixed=mixed.numpy(),
        mixed_at=mixed.data_ptr(),
        carried=carried.numpy(),
        entered=entered.numpy(),
        keep=backing,
    )


@lru_cache(maxsize=8)
def _backing(widths: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.empty(linear.MAX_ROWS * width, dtype=_FLOAT) for width in widths)
