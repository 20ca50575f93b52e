"""Write target hidden states of committed tokens into the draft's K/V cache in one compiled call.

Adapts `DSparkDraftMixin.write_target_hidden_kv` of sglang/srt/models/dspark.py (paper, 3.1.1: the
context is injected as keys and values of every draft layer). Upstream projects every row of the
verify window and selects the accepted ones when it writes; here the others are skipped before
any computation. Data that does not change between steps is resolved once (`Injector`). Decode steps
call `write_context`, prefills the hook `write_target_hidden_kv`; passes that the kernels do not
support use upstream's code.

Few rows cost nearly as much as many (a decode step's 1 to 32 read 8 MB of weights for themselves),
and most rows of a phase without drafts are never read. So rows of all decode steps are deferred
(waiting_rows.py) until a draft is about to read the context of their request. The number of rows
that such a draft must write first is bounded: where requests in a pause have more than `MOST_LIVE`
tokens of context, their rows are written in groups of `WAITING`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dspark.backends.cpu import linear
from sglang_dspark.backends.cpu.csrc import operator
from sglang_dspark.backends.cpu.fast_paths import find_or_log, log_off, require, require_class
from sglang_dspark.backends.cpu.packed_weights import packed_copy
from sglang_dspark.backends.cpu.waiting_rows import WaitingRows
from sglang_dspark.serving import upstream

INJECTOR = "dspark_injector"  # attribute of a draft model: its `Injector`, or None
WAITING = 124  # a row costs 96 us at 8 rows, 42 at 64, 37 at 128
MOST_LIVE = 4096  # rows that a draft may write first: the time of a prefill of 70 tokens
LONGEST_KEPT = 1024  # tokens of a prefill that wait in a pause
KEPT_BYTES = 256 << 20  # memory for waiting rows
_FLOAT = torch.float32


class ContextTables(ctypes.Structure):
    """`Tables` of csrc/context.cpp: addresses and sizes of L layers, Hkv heads of D.

    multiply, weights, threads: of the products with fc [d, m*d] and with stacked
    [L * 2 * Hkv * D, d]. norms: fc's [d] and those of keys [L, D]. caches [L, 2]: addresses of each
    layer's keys and values [slots, Hkv, D]. sizes: L, m*d, d, Hkv, D, rotary dimensions.
    """

    _fields_ = (
        ("multiply", c_void_p * 2),
        ("weights", c_void_p * 2),
        ("threads", c_int64 * 2),
        ("norms", c_void_p * 2),
        ("cos_sin", c_void_p),
        ("caches", c_void_p),
        ("sizes", c_int64 * 6),
        ("epsilons", c_float * 2),
    )


class Injector:
    """Write the keys and values of context tokens into one draft model's pool."""

    def __init__(self, model: Any, pool: Any, stacked: dict[str, Any], *, waits: bool = False):
        """Resolve a model and its pool.

        stacked: all layers' K and V projections as one weight (`_stacked_ctx_kv_params`).
        waits: whether every reader of the pool calls `settle` first.
        """
        attention = model.layers[0].self_attn
        cache = pool.k_buffer[0]
        numbers = [layer.self_attn.attn.layer_id - pool.start_layer for layer in model.layers]
        buffers = [(pool.k_buffer[i], pool.v_buffer[i]) for i in numbers]
        weights = (packed_copy(model.fc.weight), packed_copy(stacked["weight"]))
        kernels = [linear.kernel_of(weight) for weight in weights]
        assert None not in kernels, "resolve_injector requires weights that our kernels read"
        self.pool, self._buffers, self._weights = pool, buffers, weights
        self._fc, self._fc_at = model.fc.weight, model.fc.weight.data_ptr()
        self._fc_norm, cos_sin = model.hidden_norm.weight, attention.rotary_emb.cos_sin_cache
        norms = (self._fc_norm.detach(), stacked["k_norm_weight"])
        caches = torch.tensor([[k.data_ptr(), v.data_ptr()] for k, v in buffers])
        self._held = (*norms, cos_sin, caches)  # the tables have only addresses
        (d, width), (columns, _) = weights[0].shape, weights[1].shape
        self._tables = ContextTables(
            tuple(kernel.entry for kernel in kernels if kernel is not None),
            tuple(weight.data_ptr() for weight in weights),
            tuple(linear.threads_for(*weight.shape) for weight in weights),
            tuple(norm.data_ptr() for norm in norms),
            cos_sin.data_ptr(),
            caches.data_ptr(),
            (len(buffers), width, d, *cache.shape[1:], cos_sin.shape[1]),
            (model.hidden_norm.variance_epsilon, stacked["eps"]),
        )
        self._room = 2 * d + columns  # floats a row
        kinds = (c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p)
        self._inject: Any = operator("inject_context", *kinds)
        places = min(cache.shape[0], max(KEPT_BYTES // (4 * width), 2 * WAITING)) if waits else 0
        self._waiting = WaitingRows(places, width)
        self._fresh = 0  # rows kept since a draft last read
        self._deferring = False  # steps do not draft at present

    def holds(self, model: Any, pool: Any) -> bool:
        """Return whether model and pool are still those that were resolved."""
        weight = model.fc.weight
        return (
            pool is self.pool
            and pool.k_buffer[0] is self._buffers[0][0]
            and weight is self._fc
            and weight.data_ptr() == self._fc_at
            and model.hidden_norm.weight is self._fc_norm
        )

    def write(self, hidden: Tensor, positions: Tensor, slots: Tensor) -> bool:
        """Write or defer hidden [n, m*d]; positions, slots [n] int64.

        Returns False for more rows than the kernel supports: the caller must write them.
        """
        positions, slots = positions.long().contiguous(), slots.long().contiguous()
        if self._waits(len(hidden)):
            self._keep(hidden, positions, slots)
            return True
        self._waiting.forget(slots)
        if len(hidden) > linear.MAX_ROWS:
            return False
        self._write(hidden, positions, slots)
        return True

    def _waits(self, rows: int) -> bool:
        most = LONGEST_KEPT if self._deferring else WAITING // 2
        return rows <= min(most, len(self._waiting.slots) // 2)

    def _keep(self, hidden: Tensor, positions: Tensor, slots: Tensor) -> None:
        waiting, done = self._waiting, 0
        self._fresh += len(slots)
        while (done := waiting.keep(hidden, positions, slots, done)) < len(slots):
            held = int(slots[done]) % len(waiting.slots)
            self._write_out(waiting.take_from(held, WAITING))

    def _write_out(self, places: Tensor) -> None:
        rows = self._waiting
        for first in range(0, len(places), WAITING):
            some = places[first : first + WAITING]
            self._write(rows.features[some], rows.positions[some], rows.slots[some])

    def _write(self, hidden: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Write contiguous rows now; arguments as for `write`."""
        room, n = torch.empty(len(hidden) * self._room), len(hidden)
        if n:
            self._inject(
                ctypes.addressof(self._tables), hidden.data_ptr(), n, linear.block_rows(n),
                positions.data_ptr(), slots.data_ptr(), room.data_ptr(),
            )  # fmt: skip

    def defer(self, table: Tensor, rows: Tensor, lens: Tensor) -> None:
        """Begin a step without drafts: table [., context] int32, requests' rows and lengths [R].

        Later prefills may wait.
        """
        self._deferring = True
        if self._fresh >= WAITING and int(lens.sum()) > MOST_LIVE:
            self._settle_context(table, rows, lens)

    def settle(self, table: Tensor, rows: Tensor, lens: Tensor) -> None:
        """Write the waiting rows of these requests, whose context a draft is about to read."""
        self._deferring = False
        self._settle_context(table, rows, lens)

    def _settle_context(self, table: Tensor, rows: Tensor, lens: Tensor) -> None:
        self._fresh = 0
        self._write_out(self._waiting.take_context(table, rows, lens))

    def settle_all(self) -> None:
        """Write all waiting rows; call before any other code writes to the pool."""
        self._fresh = 0
        self._write_out(self._waiting.take_from(0, len(self._waiting.slots)))


def settle(model: Any, table: Tensor, rows: Tensor, lens: Tensor) -> None:
    """Write the waiting rows of the context that this draft model is about to read.

    table: [., context] int32 cache slots by position; rows, lens: [R] of the requests.
    """
    injector = _injector_in(model)
    if injector is not None:
        injector.settle(table, rows, lens)


def settle_all(model: Any) -> None:
    """Write all waiting rows of this draft model."""
    injector = _injector_in(model)
    if injector is not None:
        injector.settle_all()


def defer_context(model: Any, table: Tensor, rows: Tensor, lens: Tensor) -> None:
    """Begin a step in which this draft model does not draft; arguments as for `settle`."""
    injector = _injector_in(model)
    if injector is not None:
        injector.defer(table, rows, lens)


def _injector_in(model: Any) -> Injector | None:
    """Return the model's injector if it still writes with the model's weights, else None.

    After an update of weights or cache the waiting rows are dropped: those tokens are missing in
    the draft's context, which lowers acceptance and does not change the output.
    """
    injector: Injector | None = model.__dict__.get(INJECTOR)
    if injector is not None and not injector.holds(model, injector.pool):
        model.__dict__.pop(INJECTOR)
        return None
    return injector


def supports_rows(hidden: Tensor) -> bool:
    """Return whether the kernels can read rows [n, m*d]; they compute no gradients."""
    return (
        not torch.is_grad_enabled()
        and hidden.dtype is _FLOAT
        and hidden.dim() == 2
        and hidden.shape[0] > 0
        and hidden.is_contiguous()
    )


def resolve_injector(model: Any, pool: Any) -> Injector:
    """Resolve a draft model and its pool. Raises UnsupportedError if upstream must write."""
    require(linear.prepare() is not None, str(linear.why_not()))
    inherited = type(model).project_target_hidden is upstream.DFlashDraftModel.project_target_hidden
    own = f"{type(model).__name__} projects the target's features in a way of its own"
    require(inherited, own)
    require(type(model.fc) is nn.Linear and _plain(model.fc.weight), "its fc is no plain product")
    norm = model.hidden_norm
    require_class("its hidden_norm", norm, upstream.RMSNorm)
    plain = norm.variance_size_override is None and norm.weight.dtype is _FLOAT
    require(plain, "its hidden_norm is no plain norm in float32")
    require_class("its cache", pool, upstream.MHATokenToKVPool)
    require(pool.store_dtype == _FLOAT, f"its cache is {pool.store_dtype}")
    require(pool.kv_cache_layout == "nhd", f"its cache is laid out as {pool.kv_cache_layout}")
    attention = [layer.self_attn for layer in model.layers]
    rotary = attention[0].rotary_emb
    kinds = (upstream.RotaryEmbedding, upstream.Llama3RotaryEmbedding)
    require_class("its rotary embedding", rotary, *kinds)
    halves = rotary.is_neox_style and rotary.cos_sin_cache.dtype == _FLOAT
    require(halves, "its rotary embedding is not Llama's")
    for part in attention:
        require(part.v_scale is None and part.attn.k_scale is None, "its cache is scaled")
        require_class("the norm of its keys", part.k_norm, upstream.RMSNorm)
        require(part.k_norm.weight.dtype is _FLOAT, "the norm of its keys is not float32")
    stacked = model._stacked_ctx_kv_params()
    joint = stacked is not None and stacked["bias"] is None and _plain(stacked["weight"])
    require(joint, "keys and values of its layers are not one product without a bias")
    return Injector(model, pool, stacked, waits=_settled_before_drafts(model, pool))


def _settled_before_drafts(model: Any, pool: Any) -> bool:
    """Return whether all readers of the pool settle first: `Drafter` and `forward_draft` do."""
    drafts = getattr(type(model), "forward", None) is upstream.DFlashDraftModel.forward
    if not drafts:
        why = f"{type(model).__name__} has a forward of its own, not DFlashDraftModel's"
        log_off("context rows that wait for a draft", why)
    return drafts and pool.layer_transfer_counter is None  # a tiered cache also copies the pool


def _plain(weight: Tensor) -> bool:
    """Return whether our float32 kernel multiplies any number of rows with this weight [N, K]."""
    with torch.no_grad():
        return weight.dtype is _FLOAT and linear.eligible(torch.empty(1, weight.shape[1]), weight)


@dataclass(frozen=True)
class Committed:
    """Packed rows of a pass that are committed: each request's anchor, then its accepted drafts.

    requests: [R], pool rows. lens: [R], rows of each, at least 1. tokens, positions, slots: [n] of
    the rows; slots are those of the KV cache. hidden: [n, m*d], the target's features after each.
    """

    requests: Tensor
    lens: Tensor
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    hidden: Tensor


def write_context(worker: Any, committed: Committed) -> None:
    """Write or defer the hidden states of committed rows, as draft keys and values.

    Deferred rows are written before the next draft (`settle`).
    """
    model, pool = worker.draft_model, worker.draft_model_runner.token_to_kv_pool
    hidden, positions, slots = committed.hidden, committed.positions, committed.slots
    with torch.inference_mode():
        if supports_rows(hidden):
            injector = _cached_injector(model, pool)
            if injector and injector.write(hidden, positions, slots):
                return
        model.write_target_hidden_kv(
            target_hidden=hidden, pool=pool, positions=positions, cache_loc=slots
        )


def write_target_hidden_kv(
    original: Callable[..., None],
    model: Any,
    *,
    target_hidden: Tensor,
    pool: Any,
    positions: Tensor,
    cache_loc: Tensor,
    **more: Any,
) -> None:
    """Write target_hidden [n, m*d] of a prefill's tokens at `positions` [n] (AROUND hook).

    more: windows to choose rows from, or projected rows: upstream's code writes those.
    """
    told = any(value is not None and value is not False for value in more.values())
    if supports_rows(target_hidden) and not told:
        injector = _cached_injector(model, pool)
        if injector and injector.write(target_hidden, positions, cache_loc):
            return
    else:
        settle_all(model)
    original(
        model,
        target_hidden=target_hidden,
        pool=pool,
        positions=positions,
        cache_loc=cache_loc,
        **more,
    )


def _cached_injector(model: Any, pool: Any) -> Any:
    """Return the model's `Injector`, resolved again after an update of weights or cache."""
    found = model.__dict__.get(INJECTOR, ...)
    if found is ... or (found is not None and not found.holds(model, pool)):
        name = f"context of {type(model).__name__} written in one call"
        found = find_or_log(name, lambda: resolve_injector(model, pool))
        model.__dict__[INJECTOR] = found
    return found
