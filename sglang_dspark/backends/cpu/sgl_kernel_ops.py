"""Implement in torch the operators that SGLang imports from the CPU build of `sgl_kernel`.

Upstream call sites: sglang/kernels/ops/kvcache/cache_move.py, kernels/ops/speculative/
{cache_locs,eagle,multi_layer_eagle,spec_tree}.py, srt/mem_cache/allocation.py. Operators, argument
order and in-place results are upstream's; boot.py installs each that ends in `_cpu`. R requests, n
tokens in a drafted chain (EAGLE with topk 1, as in MTP-1). rows: [R], of `table`, upstream's
req_to_token. start, end: [R], columns there. slots: of the cache, all requests' in one tensor.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu.jit import kernel
from sglang_dspark.backends.cpu.ragged_layout import rows_of


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor
) -> None:
    """Do nothing for upstream's warm-up of the KV pool, which moves a slot to itself.

    Raises NotImplementedError for other moves: only the path of an accepted tree needs them.
    """
    if not torch.equal(tgt_loc, src_loc):
        verify_tree_greedy_cpu()


def assign_req_to_token_pool_cpu(
    rows: Tensor, table: Tensor, start: Tensor, end: Tensor, slots: Tensor, pool_len: int
) -> None:
    """Write table[rows[r], start[r]:end[r]] = the next end[r] - start[r] slots."""
    _copy_ranges(*(each.numpy() for each in (rows, table, start, end, slots)), True)


def assign_extend_cache_locs_cpu(
    rows: Tensor, table: Tensor, start: Tensor, end: Tensor, slots: Tensor, pool_len: int
) -> None:
    """Fill slots = table[rows[r], start[r]:end[r]] of every r, concatenated."""
    _copy_ranges(*(each.numpy() for each in (rows, table, start, end, slots)), False)


@kernel
def _copy_ranges(rows, table, start, end, slots, into_table):  # type: ignore[no-untyped-def]
    taken = 0
    for r in range(rows.shape[0]):
        for column in range(start[r], end[r]):
            if into_table:
                table[rows[r], column] = slots[taken]
            else:
                slots[taken] = table[rows[r], column]
            taken += 1


def assign_draft_cache_locs_contiguous_cpu(
    rows: Tensor, table: Tensor, start: Tensor, slots: Tensor, pool_len: int, topk: int, steps: int
) -> None:
    """Fill slots [R * topk * steps] with those from column start[r] on."""
    columns = start.long()[:, None] + torch.arange(int(topk) * int(steps))  # [R, topk * steps]
    slots.copy_(table[rows.long()[:, None], columns].reshape(-1))


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """Set bonus_tokens[r] to the last of accept_lens[r] tokens in row r of [R, stride]."""
    last = accept_lens.long() - 1 + torch.arange(accept_lens.numel()) * int(accept_stride)
    bonus_tokens.copy_(accept_tokens.reshape(-1)[last])


def rotate_input_ids_cpu(
    ids: Tensor, start: Tensor, lens: Tensor, following: Tensor, select: Tensor | None = None
) -> None:
    """Shift each request's tokens, ids[start[r]:][:lens[r]], left by one; put `following` last.

    select: [R] flat positions for the following tokens instead of each request's last.
    """
    inner = (lens - 1).clamp(min=0)
    moved = rows_of(start, inner, int(inner.sum()))
    ids[moved] = ids[moved + 1]
    live, last = lens > 0, start + lens - 1 if select is None else select
    ids[last[live].long()] = following.reshape(-1)[: len(lens)][live].to(ids.dtype)


QLEN_ONLY = 1  # the mask of a request's own tokens; SGLang's default on a CPU


def build_tree_kernel_efficient_cpu(
    parents: Tensor,
    chosen: Tensor,
    lens: Tensor,
    mask: Tensor,
    positions: Tensor,
    index: Tensor,
    following: Tensor,
    siblings: Tensor,
    topk: int,
    depth: int,
    n: int,
    mask_mode: int,
) -> None:
    """Fill mask, positions and the links of R chains of n tokens; node 0 is the root.

    lens: [R] tokens before the root. mask: bool, [n, n] a request. positions: [R * n]. index:
    [R, n] flat node numbers. following: [R, n] the node after each, -1 for none. Raises
    NotImplementedError for another mask; wider trees are refused at the start (arguments.py).
    """
    if int(mask_mode) != QLEN_ONLY:
        raise NotImplementedError(f"tree mask mode {int(mask_mode)} has no CPU form")
    requests, n = lens.numel(), int(n)
    links, visible = _chain(n)
    positions.view(requests, n).copy_(lens[:, None] + torch.arange(n))
    index.view(requests, n).copy_(torch.arange(requests * n).view(requests, n))
    following.view(requests, n).copy_(links)
    siblings.fill_(-1)
    mask.view(-1)[: requests * n * n].view(requests, n, n).copy_(visible)


@lru_cache(maxsize=32)
def _chain(n: int) -> tuple[Tensor, Tensor]:
    """Return the node after each [n], and the nodes that each sees [n, n]."""
    following = torch.arange(1, n + 1)
    following[-1] = -1
    return following, torch.ones(n, n, dtype=torch.bool).tril()


def verify_tree_greedy_cpu(*unused: Any, **named: Any) -> None:
    """Raise NotImplementedError; exists only to be imported: patches/cpu/mtp.py accepts chains."""
    raise NotImplementedError("sglang-dspark verifies no draft trees on a CPU")


fill_accept_out_cache_loc_cpu = verify_tree_greedy_cpu  # also of trees alone (topk > 1)
