"""Target hidden states of accepted tokens into the draft's K/V cache, as one call of compiled code.

Adapts `DSparkDraftMixin.write_target_hidden_kv` of sglang/srt/models/dspark.py (paper,
3.1.1: the context is injected as keys and values of every draft layer). Upstream projects every row
of the verify window and selects the accepted ones when it writes; here the others are left out
before anything is computed. What does not change between steps is resolved once (`Injector`).

Few rows cost little less than many (a decode step's 1 to 32 read 8 MB of weights for themselves),
and most rows of a phase without drafts are never read. So they wait (`context_rows.py`) until a
draft is about to read the context of their request. What that draft then has to write first is
bounded: where requests in a pause have more than `MOST_LIVE` tokens of context, their rows are
written as they come, some `WAITING` at a time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray
from numpy.typing import NDArray
from torch import Tensor, nn

from sglang_dspark.backends.cpu import linear
from sglang_dspark.backends.cpu.context_rows import (
    forget,
    keep,
    take_context,
    take_from,
    waiting_rows,
)
from sglang_dspark.backends.cpu.fast_paths import need, need_class, tell
from sglang_dspark.backends.cpu.fused_ops import rms_norm_heads, rms_norm_rows, rotate_rows
from sglang_dspark.backends.cpu.jit import floats_at, kernel, multiply_at
from sglang_dspark.backends.cpu.linear import MAX_BLOCK_ROWS
from sglang_dspark.backends.cpu.packed_weights import packed_copy
from sglang_dspark.serving import upstream

INJECTOR = "dspark_injector"  # attribute of a draft model: its `Injector`, or None
WAITING = 124  # beyond, a row costs hardly less (42 us at 64 rows, 37 at 128, 96 at 8)
MOST_LIVE = 4096  # rows a draft may find waiting: they cost what a prefill of some 70 tokens does
LONGEST_KEPT = 1024  # tokens of a prefill that wait in a pause
KEPT_BYTES = 256 << 20  # memory that rows may wait in
_FLOAT = torch.float32
_NO_LENS = torch.empty(0, dtype=torch.int32).numpy()


class _Tables(NamedTuple):
    """What the kernel needs to know. L layers, Hkv heads of D, d hidden, m*d features.

    entries, weights, threads: the matrix kernels, addresses and threads of the products with fc
    [d, m*d] and stacked [L * 2 * Hkv * D, d]. fc_norm [d], head_norms [L, D], cos_sin [positions,
    rotary]. caches [L, 2]: addresses of each layer's keys and values [slots, Hkv, D]. sizes: m*d,
    d, Hkv, D, slots.
    """

    entries: tuple[int, int]
    weights: tuple[int, int]
    threads: tuple[int, int]
    fc_norm: NDArray[np.float32]
    head_norms: NDArray[np.float32]
    epsilons: tuple[float, float]
    cos_sin: NDArray[np.float32]
    caches: NDArray[np.int64]
    sizes: tuple[int, int, int, int, int]


@kernel
def _multiply(tables, which, x, out):  # type: ignore[no-untyped-def]
    blocks = (x.shape[0] + MAX_BLOCK_ROWS - 1) // MAX_BLOCK_ROWS
    together = (x.shape[0] + blocks - 1) // blocks
    multiply_at(
        tables.entries[which], x.ctypes.data, x.shape[1], x.shape[0], together,
        tables.weights[which], out.shape[1], x.shape[1], out.ctypes.data, tables.threads[which],
    )  # fmt: skip


@kernel
def _write_layer(tables, layer, stacked, positions, slots):  # type: ignore[no-untyped-def]
    """A layer's keys, normed and rotated, and values from rows [n, L * 2 * Hkv * D] into its cache;
    positions, slots [n]. The keys in `stacked` are overwritten."""
    _, _, heads, width, places = tables.sizes
    first = layer * 2 * heads
    middle, end = (first + heads) * width, (first + 2 * heads) * width
    new = stacked[:, first * width : middle]
    rms_norm_heads(stacked, first, heads, tables.head_norms[layer], tables.epsilons[1])
    rotate_rows(positions, tables.cos_sin, new, new[:, :0], width)
    keys = carray(floats_at(tables.caches[layer, 0]), (places, heads * width))
    values = carray(floats_at(tables.caches[layer, 1]), (places, heads * width))
    for i in range(slots.shape[0]):
        keys[slots[i]] = new[i]
        values[slots[i]] = stacked[i, middle:end]


@kernel
def _chosen(lens, width, total):  # type: ignore[no-untyped-def]
    """Indices of the first lens[r] rows of each window of `width`; of all if lens is empty."""
    if lens.shape[0] == 0:
        return np.arange(total)
    found = np.empty(lens.sum(), np.int64)
    at = 0
    for r in range(lens.shape[0]):
        for k in range(lens[r]):
            found[at] = r * width + k
            at += 1
    return found


@kernel
def _inject(tables, hidden, projected, chosen, positions, slots):  # type: ignore[no-untyped-def]
    """hidden [., m*d], or [., d] if projected, positions and slots, of which rows `chosen` [n]."""
    features, d, heads, size, _ = tables.sizes
    taken = chosen.shape[0]
    rows = np.empty((taken, d if projected else features), np.float32)
    for i in range(taken):
        rows[i] = hidden[chosen[i]]
    context = rows
    if not projected:
        context = np.empty((taken, d), np.float32)
        raw = np.empty((taken, d), np.float32)
        _multiply(tables, 0, rows, raw)
        rms_norm_rows(raw, tables.fc_norm, tables.epsilons[0], context)
    layers = tables.caches.shape[0]
    stacked = np.empty((taken, layers * 2 * heads * size), np.float32)
    _multiply(tables, 1, context, stacked)
    for layer in range(layers):
        _write_layer(tables, layer, stacked, positions[chosen], slots[chosen])


class Injector:
    """Writes the keys and values of context tokens into one draft model's pool."""

    def __init__(self, model: Any, pool: Any, stacked: dict[str, Any], *, waits: bool = False):
        """stacked: the layers' K and V projections as one weight (`_stacked_ctx_kv_params`).

        waits: whether whoever reads the pool calls `settle` before.
        """
        attention = model.layers[0].self_attn
        cache = pool.k_buffer[0]
        numbers = [layer.self_attn.attn.layer_id - pool.start_layer for layer in model.layers]
        buffers = [(pool.k_buffer[i], pool.v_buffer[i]) for i in numbers]
        weights = (packed_copy(model.fc.weight), packed_copy(stacked["weight"]))
        products = [_product(weight) for weight in weights]
        self.pool, self._buffers, self._weights = pool, buffers, weights
        self._fc, self._fc_at = model.fc.weight, model.fc.weight.data_ptr()
        self._fc_norm = model.hidden_norm.weight
        self._tables = _Tables(
            (products[0][0], products[1][0]),
            (weights[0].data_ptr(), weights[1].data_ptr()),
            (products[0][1], products[1][1]),
            self._fc_norm.detach().numpy(),
            stacked["k_norm_weight"].detach().numpy(),
            (model.hidden_norm.variance_epsilon, stacked["eps"]),
            attention.rotary_emb.cos_sin_cache.numpy(),
            np.array([[k.data_ptr(), v.data_ptr()] for k, v in buffers], dtype=np.int64),
            (*reversed(weights[0].shape), *cache.shape[1:], cache.shape[0]),
        )
        width = weights[0].shape[1]
        places = min(cache.shape[0], max(KEPT_BYTES // (4 * width), 2 * WAITING)) if waits else 0
        self._waiting = waiting_rows(places, width)
        self._fresh = 0  # rows kept since a draft last read
        self._deferring = False  # no draft reads for now
        if waits:
            self._compile()

    def _compile(self) -> None:
        """What only some steps need is compiled before the first of them."""
        nothing = np.empty(0, np.int64)
        forget(self._waiting, nothing, nothing)
        self.settle_all()

    def holds(self, model: Any, pool: Any) -> bool:
        """Whether model and pool still are what was resolved."""
        weight = model.fc.weight
        return (
            pool is self.pool
            and pool.k_buffer[0] is self._buffers[0][0]
            and weight is self._fc
            and weight.data_ptr() == self._fc_at
            and model.hidden_norm.weight is self._fc_norm
        )

    def write(
        self,
        hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        lens: Tensor | None,
        *,
        projected: bool,
    ) -> bool:
        """hidden [n, m*d] target features, or [n, d] if projected; positions, slots [n] int64.

        lens: [R] int32, tokens of each window of n / R that stay; None: all n stay. False: more
        rows than the kernel takes; whoever writes them does it now.
        """
        counted = _NO_LENS if lens is None else lens.numpy()
        total = hidden.shape[0]
        chosen = _chosen(counted, total // max(len(counted), 1), total)
        features, at, places = hidden.numpy(), positions.numpy(), slots.numpy()
        if not projected and self._waits(len(chosen)):
            self._keep(features, chosen, at, places)
            return True
        forget(self._waiting, chosen, places)
        if total > linear.MAX_ROWS:
            return False
        _inject(self._tables, features, projected, chosen, at, places)
        return True

    def _waits(self, rows: int) -> bool:
        most = LONGEST_KEPT if self._deferring else WAITING // 2
        return rows <= min(most, len(self._waiting.slots) // 2)

    def _keep(self, features: Any, chosen: Any, positions: Any, slots: Any) -> None:
        waiting, done = self._waiting, 0
        self._fresh += len(chosen)
        while (done := keep(waiting, features, chosen, done, positions, slots)) < len(chosen):
            held = int(slots[chosen[done]]) % len(waiting.slots)
            self._write_out(take_from(waiting, held, WAITING))

    def _write_out(self, places: Any) -> None:
        waiting = self._waiting
        for first in range(0, len(places), WAITING):
            some = places[first : first + WAITING]
            _inject(self._tables, waiting.features, False, some, waiting.positions, waiting.slots)

    def defer(self, table: Tensor, rows: Tensor, lens: Tensor) -> None:
        """A step without drafts begins: table [., context] int32, requests' rows and lengths [R].

        Prefills may wait from now on.
        """
        self._deferring = True
        if self._fresh >= WAITING and int(lens.sum()) > MOST_LIVE:
            self._settle_context(table, rows, lens)

    def settle(self, table: Tensor, rows: Tensor, lens: Tensor) -> None:
        """Write what waits for the context of these requests, which a draft is about to read."""
        self._deferring = False
        self._settle_context(table, rows, lens)

    def _settle_context(self, table: Tensor, rows: Tensor, lens: Tensor) -> None:
        self._fresh = 0
        context = (table.numpy(), rows.numpy(), lens.numpy())
        self._write_out(take_context(self._waiting, *context))

    def settle_all(self) -> None:
        """Write all that waits; call before somebody else writes to the pool."""
        self._fresh = 0
        self._write_out(take_from(self._waiting, 0, self.waiting))

    @property
    def waiting(self) -> int:
        """Rows that wait."""
        return int(self._waiting.number[0])


def settle(model: Any, table: Tensor, rows: Tensor, lens: Tensor) -> None:
    """Write what waits for the context that this draft model is about to read.

    table: [., context] int32 cache slots by position; rows, lens: [R] of the requests.
    """
    injector = _injector_in(model)
    if injector is not None:
        injector.settle(table, rows, lens)


def settle_all(model: Any) -> None:
    """Write whatever waits for this draft model."""
    injector = _injector_in(model)
    if injector is not None:
        injector.settle_all()


def defer_context(model: Any, table: Tensor, rows: Tensor, lens: Tensor) -> None:
    """A step begins in which this draft model does not draft; arguments as for `settle`."""
    injector = _injector_in(model)
    if injector is not None:
        injector.defer(table, rows, lens)


def _injector_in(model: Any) -> Injector | None:
    """The model's injector, if there is one and it still writes with the model's weights.

    After an exchange of weights or cache what waited is lost with the old ones: those tokens
    are missing in the draft's context, which costs acceptance and nothing else.
    """
    injector: Injector | None = model.__dict__.get(INJECTOR)
    if injector is not None and not injector.holds(model, injector.pool):
        model.__dict__.pop(INJECTOR)
        return None
    return injector


def takes(hidden: Tensor) -> bool:
    """Whether rows [n, m*d or d] are what the kernels read; they compute no gradients."""
    return (
        not torch.is_grad_enabled()
        and hidden.dtype is _FLOAT
        and hidden.dim() == 2
        and hidden.shape[0] > 0
        and hidden.is_contiguous()
    )


def injector_of(model: Any, pool: Any) -> Injector:
    """Resolve a draft model and its pool. Raises UnfitError where upstream's code has to write."""
    need(linear.prepare() is not None, str(linear.why_not()))
    inherited = type(model).project_target_hidden is upstream.DFlashDraftModel.project_target_hidden
    own = f"{type(model).__name__} projects the target's features in a way of its own"
    need(inherited, own)
    need(type(model.fc) is nn.Linear and _plain(model.fc.weight), "its fc is no plain product")
    norm = model.hidden_norm
    need_class("its hidden_norm", norm, upstream.RMSNorm)
    plain = norm.variance_size_override is None and norm.weight.dtype is _FLOAT
    need(plain, "its hidden_norm is no plain norm in float32")
    need_class("its cache", pool, upstream.MHATokenToKVPool)
    need(pool.store_dtype == _FLOAT, f"its cache is {pool.store_dtype}")
    need(pool.kv_cache_layout == "nhd", f"its cache is laid out as {pool.kv_cache_layout}")
    attention = [layer.self_attn for layer in model.layers]
    rotary = attention[0].rotary_emb
    kinds = (upstream.RotaryEmbedding, upstream.Llama3RotaryEmbedding)
    need_class("its rotary embedding", rotary, *kinds)
    halves = rotary.is_neox_style and rotary.cos_sin_cache.dtype == _FLOAT
    need(halves, "its rotary embedding is not Llama's")
    for part in attention:
        need(part.v_scale is None and part.attn.k_scale is None, "its cache is scaled")
        need_class("the norm of its keys", part.k_norm, upstream.RMSNorm)
    stacked = model._stacked_ctx_kv_params()
    joint = stacked is not None and stacked["bias"] is None and _plain(stacked["weight"])
    need(joint, "keys and values of its layers are not one product without a bias")
    return Injector(model, pool, stacked, waits=_settled_before_drafts(model, pool))


def _settled_before_drafts(model: Any, pool: Any) -> bool:
    """Whether `forward_draft` (layers/models.py) stands before all readers of the pool."""
    drafts = getattr(type(model), "forward", None) is upstream.DFlashDraftModel.forward
    if not drafts:
        why = f"{type(model).__name__} has a forward of its own, not DFlashDraftModel's"
        tell("context rows that wait for a draft", why)
    return drafts and pool.layer_transfer_counter is None  # a cache in tiers copies it as well


def _plain(weight: Tensor) -> bool:
    """Whether our float32 kernel multiplies rows by this weight [N, K], however many they are."""
    with torch.no_grad():
        return weight.dtype is _FLOAT and linear.eligible(torch.empty(1, weight.shape[1]), weight)


def _product(weight: Tensor) -> tuple[int, int]:
    """The kernel that multiplies with a weight [N, K], its address, and the threads it takes."""
    multiply = linear.kernel_of(weight)
    assert multiply is not None
    threads = linear.threads_for(*weight.shape)
    return multiply.entry, threads
