"""What one forward pass attends to, worked out once a step and read by every layer.

Adapts the metadata half of sglang/srt/layers/attention/base_attn_backend.py (0.5.23). Cache slots
stay where SGLang keeps them: row `req_rows[r]` of the table `req_to_token`, read in place by the
kernel, so a plan is a handful of small integer arrays.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Index = NDArray[np.int64]


@dataclass(frozen=True)
class AttentionPlan:
    """R requests of one pass.

    table: [rows, context] cache slots by position, any integer type. req_rows: [R] rows of it.
    query_start: [R] first query token. query_lens: [R] query tokens. kv_lens: [R] cached tokens
    the request ends with, its query tokens included (also those of a bidirectional block).
    tree: [R, n, n] bool, which of the last n cached tokens each of n query tokens sees; None for a
    chain.
    """

    table: NDArray[Any]
    req_rows: Index
    query_start: Index
    query_lens: Index
    kv_lens: Index
    tree: NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        shape = self.req_rows.shape
        arrays = (self.query_start, self.query_lens, self.kv_lens)
        if len(shape) != 1 or any(a.shape != shape for a in arrays):
            raise ValueError("req_rows, query_start, query_lens and kv_lens must all be [R]")
        if bool((self.query_lens > self.kv_lens).any()):
            raise ValueError(
                f"query lengths {self.query_lens.tolist()} exceed the cached lengths "
                f"{self.kv_lens.tolist()}; a pass writes its own tokens to the cache first"
            )
        if self.kv_lens.size and int(self.kv_lens.max()) > self.table.shape[1]:
            raise ValueError(
                f"{int(self.kv_lens.max())} cached tokens do not fit a table of "
                f"{self.table.shape[1]} columns"
            )

    @cached_property
    def longest_query(self) -> int:
        """Query tokens of the longest request, 0 for an empty pass."""
        return int(self.query_lens.max()) if self.query_lens.size else 0

    @property
    def num_queries(self) -> int:
        """Query tokens of the whole pass."""
        return int(self.query_lens.sum())

    def slots(self, r: int) -> Tensor:
        """Cache slots of request r in order of position, [kv_lens[r]] int64."""
        row = self.table[self.req_rows[r], : self.kv_lens[r]]
        return torch.from_numpy(row.astype(np.int64))


def make_plan(
    table: Tensor,
    req_rows: Tensor,
    query_lens: Any,
    kv_lens: Any,
    tree: Tensor | None = None,
) -> AttentionPlan:
    """An `AttentionPlan` from tensors or sequences of lengths [R]."""
    queries = np.asarray(query_lens, dtype=np.int64)
    return AttentionPlan(
        table=table.numpy(),
        req_rows=req_rows.to(torch.int64).numpy(),
        query_start=np.cumsum(queries) - queries,
        query_lens=queries,
        kv_lens=np.asarray(kv_lens, dtype=np.int64),
        tree=None if tree is None else tree.numpy(),
    )


def plan_of_batch(forward_batch: Any, table: Tensor) -> AttentionPlan:
    """Plan of any SGLang pass: decode, extend, draft-extend, target-verify or draft block.

    In a target-verify pass (DSPARK's draft block is one, too) `seq_lens` counts the tokens before
    the window; in every other mode it counts the query tokens as well.
    """
    mode = forward_batch.forward_mode
    lens = forward_batch.seq_lens.numpy().astype(np.int64)
    tree = None
    if mode.is_decode_or_idle():
        queries = np.ones_like(lens)
    elif mode.is_target_verify():
        queries = _verify_windows(forward_batch.spec_info, lens.size)
        lens = lens + queries
        tree = _tree_mask(forward_batch.spec_info, lens.size)
    else:
        queries = np.asarray(forward_batch.extend_seq_lens, dtype=np.int64)
    return make_plan(table, forward_batch.req_pool_indices, queries, lens, tree)


def _verify_windows(spec_info: Any, rows: int) -> Index:
    """Window lengths 1 + l_r: ragged where a layout says so, else draft_token_num for all."""
    layout = getattr(spec_info, "ragged_verify_layout", None)
    if layout is not None:
        return np.asarray(layout.verify_lens, dtype=np.int64)
    return np.full(rows, int(spec_info.draft_token_num), dtype=np.int64)


def _tree_mask(spec_info: Any, rows: int) -> Tensor | None:
    """EAGLE's [R, n, n] mask where the draft is wider than a chain (topk > 1)."""
    if getattr(spec_info, "tree_topk", None) in (None, 1):
        return None
    mask, n = spec_info.custom_mask, int(spec_info.draft_token_num)
    if mask is None or mask.numel() == 0:
        return None
    return mask.reshape(-1)[: rows * n * n].view(rows, n, n).bool()
