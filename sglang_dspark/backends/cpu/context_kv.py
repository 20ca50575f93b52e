"""Write target hidden states of committed tokens into the draft's K/V cache in one compiled call.

Adapts `DSparkDraftMixin.write_target_hidden_kv` of sglang/srt/models/dspark.py (paper, 3.1.1: the
context is injected as keys and values of every draft layer). Upstream projects every row of the
verify window and selects the accepted ones when it writes; here the others are skipped before
any computation. Data that does not change between steps is resolved once (`Injector`). Upstream's
code writes the passes that the kernels do not support.

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
from sglang_dspark.backends.cpu.attention import require_plain_pool
from sglang_dspark.backends.cpu.csrc import operator
from sglang_dspark.backends.cpu.fast_paths import find_or_log, log_off, require
from sglang_dspark.backends.cpu.layers import layer_spec
from sglang_dspark.backends.cpu.packed_weights import packed_copy
from sglang_dspark.backends.cpu.waiting_rows import WaitingRows
from sglang_dspark.serving import upstream, weight_updates

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
        cache, cos_sin = pool.k_buffer[0], model.layers[0].self_attn.rotary_emb.cos_sin_cache
        numbers = [layer.self_attn.attn.layer_id - pool.start_layer for layer in model.layers]
        buffers = [(pool.k_buffer[i], pool.v_buffer[i]) for i in numbers]
        weights = (packed_copy(model.fc.weight), packed_copy(stacked["weight"]))
        kernels = [linear.kernel_of(weight) for weight in weights]
        assert None not in kernels, "resolve_injector requires weights that our kernels read"
        self.pool, self._weights, self._read = pool, weights, _addresses(model, pool)
        norms = (model.hidden_norm.weight.detach(), stacked["k_norm_weight"])
        caches = torch.tensor([[k.data_ptr(), v.data_ptr()] for k, v in buffers])
        # Addresses keep no memory allocated, and other weights must not get the same ones.
        self._held = (*norms, cos_sin, caches, buffers, model.fc.weight.detach())
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
        kinds = (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p)
        self._inject: Any = operator("inject_context", *kinds)
        places = min(cache.shape[0], max(KEPT_BYTES // (4 * width), 2 * WAITING)) if waits else 0
        self._waiting = WaitingRows(places, width)
        self._fresh = 0  # rows kept since a draft last read
        self._deferring = False  # steps do not draft at present

    def holds(self, model: Any, pool: Any) -> bool:
        """Return whether model and pool are still those that were resolved."""
        return pool is self.pool and _addresses(model, pool) == self._read

    def write(self, hidden: Tensor, positions: Tensor, slots: Tensor) -> bool:
        """Write or defer hidden [n, m*d]; positions, slots [n] int64.

        Returns False for more rows than the kernel supports: the caller must write them.
        """
        positions, slots = positions.long().contiguous(), slots.long().contiguous()
        most = LONGEST_KEPT if self._deferring else WAITING // 2
        if len(hidden) <= min(most, len(self._waiting.slots) // 2):
            self._keep(hidden, positions, slots)
            return True
        self._waiting.forget(slots)
        if len(hidden) > linear.MAX_ROWS:
            return False
        self._write(hidden, positions, slots)
        return True

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
        """Write contiguous rows now, at least one; arguments as for `write`."""
        room, n = torch.empty(len(hidden) * self._room), len(hidden)
        self._inject(
            ctypes.addressof(self._tables), hidden.data_ptr(), n, positions.data_ptr(),
            slots.data_ptr(), room.data_ptr(),
        )  # fmt: skip

    def settle(self, table: Tensor, rows: Tensor, lens: Tensor, drafts: bool) -> None:
        """Write waiting rows of these requests, as the function `settle` does."""
        self._deferring = not drafts
        if drafts or (self._fresh >= WAITING and int(lens.sum()) > MOST_LIVE):
            self._fresh = 0
            self._write_out(self._waiting.take_context(table, rows, lens))

    def settle_all(self) -> None:
        """Write all waiting rows."""
        self._fresh = 0
        self._write_out(self._waiting.take_from(0, len(self._waiting.slots)))


def _addresses(model: Any, pool: Any) -> list[int]:
    """Return where the resolved weights and cache are."""
    read = (model.fc.weight, model.hidden_norm.weight, pool.k_buffer[0])
    return [each.data_ptr() for each in read]


def settle(model: Any, table: Tensor, rows: Tensor, lens: Tensor, *, drafts: bool = True) -> None:
    """Write the waiting rows of the context that this draft model is about to read.

    table: [., context] int32 cache slots by position; rows, lens: [R] of the requests. drafts:
    False in a step without drafts: rows are written only where too many wait, and later prefills
    may wait too.
    """
    injector = _injector_in(model)
    if injector is not None:
        injector.settle(table, rows, lens, drafts)


def settle_all(model: Any) -> None:
    """Write all waiting rows of this draft model, before other code writes to its pool."""
    injector = _injector_in(model)
    if injector is not None:
        injector.settle_all()


def _forget(model: Any) -> None:
    """Resolve a draft model again at its next write: it has packed copies of updated weights."""
    model.__dict__.pop(INJECTOR, None)


weight_updates.FORGET.append(_forget)


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
    layer_spec.norm_of(model.hidden_norm, model.fc.weight.shape[0])
    require_plain_pool(pool)
    layer_spec.rotary_table(model.layers[0].self_attn.rotary_emb)
    for part in (layer.self_attn for layer in model.layers):
        require(part.v_scale is None and part.attn.k_scale is None, "its cache is scaled")
        layer_spec.norm_of(part.k_norm, pool.head_dim)
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
    with torch.inference_mode():
        worker.draft_model.write_target_hidden_kv(
            target_hidden=committed.hidden,
            pool=worker.draft_model_runner.token_to_kv_pool,
            positions=committed.positions,
            cache_loc=committed.slots,
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
    """Write or defer target_hidden [n, m*d] of tokens at `positions` [n] (AROUND hook).

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
