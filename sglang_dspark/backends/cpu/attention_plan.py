"""Plan the attention of one forward pass, once a step, for all its layers.

Adapts the metadata half of sglang/srt/layers/attention/base_attn_backend.py. Cache slots stay in
SGLang's table: the kernel reads row `row` of `req_to_token` in place, so a plan is a few small
integers per request. Data that only some passes need (slots as index tensors, masks) is made
on first use and cached for the other layers.

The plan of a draft block with a window over its context (backends/moe/block_window.py) has a table
that begins where the window does, so the ordinary kernels read fewer slots.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Index = NDArray[np.int64]

# Columns of `AttentionPlan.requests`.
ROW, FIRST, QUERIES, CACHED = range(4)


class PlanAddresses(ctypes.Structure):
    """A plan in the kernel's layout: `Plan` of csrc/attention.h."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("columns", ctypes.c_int64),
        ("requests", ctypes.c_void_p),
        ("count", ctypes.c_int64),
    )


@dataclass(frozen=True)
class AttentionPlan:
    """The attention plan of R requests in one pass.

    table: [rows, context] int32 cache slots by position. requests: [R, 4] with the request's row
    of the table, its first query token, its number of query tokens, and its number of cached tokens
    after the pass (its query tokens included, also those of a bidirectional block).
    """

    table: NDArray[np.int32]
    requests: Index

    def __post_init__(self) -> None:
        queries, cached = self.requests[:, QUERIES], self.requests[:, CACHED]
        columns = self.table.shape[1]
        if bool((queries > cached).any() or (cached > columns).any()):
            raise ValueError(
                f"{queries.tolist()} queries, {cached.tolist()} cached tokens (queries included) "
                f"and a table of {columns} columns do not fit"
            )

    @cached_property
    def num_queries(self) -> int:
        """Count the query tokens of the whole pass."""
        return int(self.requests[:, QUERIES].sum())

    @cached_property
    def seen(self) -> int:
        """Count pairs of a query and a cached token of its request."""
        return int((self.requests[:, QUERIES] * self.requests[:, CACHED]).sum())

    @cached_property
    def addresses(self) -> PlanAddresses:
        """Return the plan for the kernel, valid while the plan exists."""
        table, requests = self.table, self.requests
        return PlanAddresses(table.ctypes.data, table.shape[1], requests.ctypes.data, len(requests))

    @cached_property
    def slots(self) -> list[Tensor | slice]:
        """List each request's cache slots by position: [cached] int64, a slice if consecutive."""
        return [
            consecutive(torch.from_numpy(self.table[row, :cached].astype(np.int64)))
            for row, cached in self.requests[:, [ROW, CACHED]].tolist()
        ]

    @cached_property
    def _masks(self) -> dict[tuple[int, bool, int, torch.dtype], Tensor | None]:
        return {}

    def mask(self, r: int, causal: bool, window: int, dtype: torch.dtype) -> Tensor | None:
        """Return the mask [queries, cached] of request r, as `_mask` builds it, for all layers."""
        key = (r, causal, window, dtype)
        if key not in self._masks:
            queries, cached = self.requests[r, [QUERIES, CACHED]].tolist()
            self._masks[key] = _mask(queries, cached, causal, window, dtype)
        return self._masks[key]


def make_plan(table: Tensor, req_rows: Tensor, query_lens: Any, kv_lens: Any) -> AttentionPlan:
    """Make a plan from tensors or sequences of lengths [R]; queries are in request order."""
    queries = np.asarray(query_lens, dtype=np.int64)
    requests = np.empty((queries.size, 4), np.int64)
    requests[:, ROW] = req_rows.numpy()
    requests[:, FIRST] = np.cumsum(queries) - queries
    requests[:, QUERIES] = queries
    requests[:, CACHED] = np.asarray(kv_lens, dtype=np.int64)
    return AttentionPlan(table=table.numpy(), requests=requests)


def plan_of_batch(forward_batch: Any, table: Tensor) -> AttentionPlan:
    """Plan any SGLang pass: decode, extend, draft-extend, target-verify or draft block.

    In a target-verify pass (DSPARK's draft block is one, too) `seq_lens` counts the tokens before
    the window; in every other mode it counts the query tokens as well.
    """
    mode = forward_batch.forward_mode
    lens = forward_batch.seq_lens.numpy().astype(np.int64)
    if mode.is_decode_or_idle():
        queries = np.ones_like(lens)
    elif mode.is_target_verify():
        spec = forward_batch.spec_info
        layout = getattr(spec, "ragged_verify_layout", None)  # None: windows of one length
        windows = spec.draft_token_num if layout is None else layout.verify_lens
        queries = np.broadcast_to(np.asarray(windows, dtype=np.int64), lens.shape)
        lens = lens + queries
    else:
        queries = np.asarray(forward_batch.extend_seq_lens, dtype=np.int64)
    return make_plan(table, forward_batch.req_pool_indices, queries, lens)


def consecutive(slots: Tensor) -> Tensor | slice:
    """Return slots [L] as a slice where they are consecutive: reading K is then a view."""
    if slots.numel() > 0:
        first, last = int(slots[0]), int(slots[-1])
        if last - first == slots.numel() - 1 and bool((slots.diff() == 1).all()):
            return slice(first, last + 1)
    return slots


def _mask(count: int, total: int, causal: bool, window: int, dtype: torch.dtype) -> Tensor | None:
    """Mask the positions that the last `count` of `total` do not see by -inf: [count, total].

    None if they see all. window: number of earlier positions that a query sees; negative for all.
    """
    if window < 0 and (not causal or count == 1):
        return None
    key = torch.arange(total)[None, :]
    query = torch.arange(total - count, total)[:, None]
    hidden = key > query if causal else torch.zeros(count, total, dtype=torch.bool)
    if window >= 0:
        hidden |= key < query - window
    return torch.zeros(count, total, dtype=dtype).masked_fill_(hidden, float("-inf"))


def narrowed(plan: AttentionPlan, window: int) -> AttentionPlan:
    """Drop tokens more than `window` before a request's query tokens from the plan.

    Returns the same plan where no request has such tokens.
    """
    requests = plan.requests
    dropped = np.maximum(requests[:, CACHED] - requests[:, QUERIES] - window, 0)
    if not dropped.any():
        return plan
    seen = requests[:, CACHED] - dropped
    columns = dropped[:, None] + np.arange(int(seen.max()))
    columns = np.minimum(columns, plan.table.shape[1] - 1)  # past `seen`: not read
    table = plan.table[requests[:, ROW, None], columns]
    moved = requests.copy()
    moved[:, ROW], moved[:, CACHED] = np.arange(len(requests)), seen
    return AttentionPlan(table, moved)
