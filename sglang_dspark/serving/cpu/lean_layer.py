"""A Llama decoder layer as nine kernel calls, everything that does not change resolved beforehand.

Adapts `LlamaDecoderLayer.forward` of sglang/srt/models/llama.py (0.5.23). With a handful of rows
SGLang's modules, boundaries and linear wrappers cost more than a small layer's arithmetic besides
the products; here a layer keeps the addresses, weights and buffers it needs (`LeanLayer`, resolved
by lean_fit.py), and a pass what its layers share (`Step`). The kernels and their arguments are
those of the ordinary path, so are the bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sglang_dspark.serving.cpu import fused_ops, linear, paged
from sglang_dspark.serving.cpu.attention import DsparkCpuAttnBackend
from sglang_dspark.serving.cpu.narrow_matmul import NarrowMatmul
from sglang_dspark.serving.cpu.plan import AttentionPlan

MOST_ROWS = min(linear.MAX_ROWS, fused_ops.MOST_ROWS)
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

    parts: modules that LoRA and the like may exchange, as (owner's dict, name, module).
    """

    shape: Shape
    kernel: NarrowMatmul
    first_norm: Norm
    second_norm: Norm
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
    [n, heads, D].
    """

    rows: int
    block: int
    normed: Matrix  # [n, d]
    normed_at: int
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
    keep: tuple[Tensor, ...]


@dataclass(frozen=True)
class Step:
    """What the layers of one pass share; it holds while the pass's tensors are the same objects."""

    backend: DsparkCpuAttnBackend
    plan: AttentionPlan
    positions: Tensor
    slots: Tensor
    rows: int
    positions_array: Matrix  # [n] int64
    slots_array: Matrix  # [n] int64
    attend: Any


def step_of(
    backend: Any, positions: Tensor, hidden: Tensor, forward_batch: Any, cached: Step | None
) -> Step | None:
    """The pass that positions [n], hidden [n, d] and the batch describe; None if it does not fit.

    cached: the step of the layer before, returned as long as it is the same pass.
    """
    slots = forward_batch.out_cache_loc
    if (
        cached is not None
        and cached.plan is getattr(backend, "short", None)
        and cached.backend is backend
        and cached.positions is positions
        and cached.slots is slots
        and hidden.shape[0] == cached.rows
        and not torch.is_grad_enabled()
    ):
        return cached
    rows = hidden.shape[0]
    if (
        not isinstance(backend, DsparkCpuAttnBackend)
        or not backend.writes_in_place
        or backend.short is None
        or backend.long is not None
        or torch.is_grad_enabled()
        or forward_batch.forward_mode.is_idle()
        or backend.token_to_kv_pool.layer_transfer_counter is not None
        or not 0 < rows <= MOST_ROWS
        or rows != backend.num_queries
        or not _plain_index(positions, rows)
        or not _plain_index(slots, rows)
    ):
        return None
    return Step(
        backend=backend,
        plan=backend.short,
        positions=positions,
        slots=slots,
        rows=rows,
        positions_array=positions.numpy(),
        slots_array=slots.numpy(),
        attend=paged.compiled(backend.threads > 1),
    )


def run(
    lean: LeanLayer, step: Step, hidden: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """One layer: hidden [n, d], the last layer's output, still to be added to residual [n, d].

    Returns (output, residual to add it to, residual after the first addition), all [n, d]; without
    a residual `hidden` is the embedding and is itself the residual. Nothing given is modified.
    """
    room = room_of(lean.shape, step.rows)
    norm = lean.first_norm
    if residual is None:
        entered = hidden
        fused_ops._rms_norm(hidden.numpy(), norm.weight, norm.epsilon, room.normed)
    else:
        entered = torch.empty_like(hidden)
        fused_ops._add_rms_norm(
            hidden.numpy(),
            residual.numpy(),
            norm.weight,
            norm.epsilon,
            entered.numpy(),
            room.normed,
        )
    _attend(lean, step, room)
    mixed, carried = torch.empty_like(hidden), torch.empty_like(hidden)
    _multiply(lean, lean.o, room, room.attended_at, mixed.data_ptr())
    norm = lean.second_norm
    fused_ops._add_rms_norm(
        mixed.numpy(), entered.numpy(), norm.weight, norm.epsilon, carried.numpy(), room.normed
    )
    _multiply(lean, lean.gate_up, room, room.normed_at, room.gate_up_at)
    fused_ops._silu_and_mul(room.gate_up, room.activated)
    _multiply(lean, lean.down, room, room.activated_at, mixed.data_ptr())
    return mixed, carried, entered


def _attend(lean: LeanLayer, step: Step, room: Room) -> None:
    """room.attended from room.normed; K and V go to the pool."""
    _multiply(lean, lean.qkv, room, room.normed_at, room.qkv_at)
    fused_ops._rotate(
        step.positions_array, lean.cos_sin, room.flat_query, room.flat_key, lean.shape.head
    )
    pool, plan = step.backend.token_to_kv_pool, step.plan
    index = lean.index - pool.start_layer
    step.attend(
        room.query, pool.k_buffer[index].numpy(), pool.v_buffer[index].numpy(), room.key,
        room.value, step.slots_array, plan.table, plan.requests, plan.trees, lean.scale,
        lean.causal, lean.window, room.attended,
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


@lru_cache(maxsize=4 * MOST_ROWS)
def room_of(shape: Shape, rows: int) -> Room:
    """The buffers for a number of rows; layers of a shape share them, as one runs at a time."""
    query_width, key_width = shape.heads * shape.head, shape.kv_heads * shape.head
    widths = (
        shape.hidden,
        query_width + 2 * key_width,
        query_width,
        2 * shape.mlp,
        shape.mlp,
    )
    backing = _backing(widths)
    normed, qkv, attended, gate_up, activated = (
        whole[: rows * width].view(rows, width)
        for whole, width in zip(backing, widths, strict=True)
    )
    query, key, value = qkv.split([query_width, key_width, key_width], dim=-1)
    return Room(
        rows=rows,
        block=linear.block_rows(rows),
        normed=normed.numpy(),
        normed_at=normed.data_ptr(),
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
        keep=backing,
    )


@lru_cache(maxsize=8)
def _backing(widths: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.empty(MOST_ROWS * width, dtype=_FLOAT) for width in widths)


def _plain_index(index: Any, rows: int) -> bool:
    return (
        isinstance(index, Tensor)
        and index.dtype == torch.int64
        and index.shape == (rows,)
        and index.is_contiguous()
    )
