"""Implement in torch the operators that SGLang imports from the CPU build of `sgl_kernel`.

Upstream call sites: sglang/kernels/ops/kvcache/cache_move.py, kernels/ops/speculative/
{cache_locs,eagle,multi_layer_eagle,spec_tree}.py, srt/mem_cache/allocation.py. Names, argument
order and in-place results are theirs. R requests, n tokens in a draft tree.

Draft trees of EAGLE: a chain (topk 1, as in MTP-1) has a vectorised path; wider trees are walked
request by request. The drafting steps propose candidates numbered 0..topk-1 in the first step and
topk + topk**2 * s onwards in later ones; `selected_index` [R, n - 1] names those kept,
`parent_list` the candidate that each group of topk continues.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.backends.cpu.jit import kernel

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor
) -> None:
    """Move cache rows src_loc -> tgt_loc in every buffer, as if all reads came first.

    data_ptrs: [L] addresses of the buffers. strides: [L] bytes of one row. tgt_loc, src_loc: [n].
    """
    if tgt_loc.numel() == 0:
        return
    source = src_loc.to(torch.int64).numpy()
    target = tgt_loc.to(torch.int64).numpy()
    rows = int(max(source.max(), target.max())) + 1
    for address, stride in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (rows * stride)).from_address(address)
        buffer = np.frombuffer(memory, dtype=np.uint8).reshape(rows, stride)
        buffer[target] = buffer[source]


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """req_to_token[row_r, start_r:end_r] = the next end_r - start_r entries of out_cache_loc."""
    ranges = (each.numpy() for each in (req_pool_indices, start_offset, end_offset))
    _copy_ranges(*ranges, req_to_token.numpy(), out_cache_loc.numpy(), True)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Fill out_cache_loc = req_to_token[row_r, start_r:end_r] of every r, concatenated."""
    ranges = (each.numpy() for each in (req_pool_indices, start_offset, end_offset))
    _copy_ranges(*ranges, req_to_token.numpy(), out_cache_loc.numpy(), False)


@kernel
def _copy_ranges(rows, start, end, table, slots, into_table):  # type: ignore[no-untyped-def]
    taken = 0
    for r in range(rows.shape[0]):
        for column in range(start[r], end[r]):
            if into_table:
                table[rows[r], column] = slots[taken]
            else:
                slots[taken] = table[rows[r], column]
            taken += 1


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    speculative_num_steps: int,
) -> None:
    """out_cache_loc [R * topk * steps] = the slots right after each request's seq_len tokens."""
    width = int(topk) * int(speculative_num_steps)
    column = seq_lens.to(torch.int64)[:, None] + torch.arange(width)  # [R, width]
    slots = req_to_token[req_pool_indices.to(torch.int64)[:, None], column]
    out_cache_loc.copy_(slots.reshape(-1))


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """bonus_tokens[r] = the last of accept_lens[r] tokens in row r of accept_tokens [R, stride]."""
    last = accept_lens.to(torch.int64) - 1
    last += torch.arange(accept_lens.numel()) * int(accept_stride)
    bonus_tokens.copy_(accept_tokens.reshape(-1)[last])


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """Compact the cache slots of accepted tokens; accept_index holds -1 where none was."""
    flat = accept_index.reshape(-1)
    kept = flat[flat >= 0].to(torch.int64)
    accept_out_cache_loc[: kept.numel()] = out_cache_loc[kept].to(accept_out_cache_loc.dtype)


def rotate_input_ids_cpu(
    input_ids: Tensor,
    extend_start_loc: Tensor,
    extend_seq_lens: Tensor,
    topk_index: Tensor,
    select_index: Tensor | None = None,
) -> None:
    """Shift each request's tokens left by one and put its next token (topk_index) at the end.

    select_index: [R] flat positions for the next tokens instead of each request's last.
    """
    lens = extend_seq_lens.to(torch.int64)
    start = extend_start_loc.to(torch.int64)
    live = lens > 0
    request = torch.repeat_interleave(torch.arange(lens.numel()), lens)  # of each token
    position = torch.arange(request.numel()) + (start - (lens.cumsum(0) - lens))[request]
    shift = position < (start + lens - 1)[request]
    input_ids[position[shift]] = input_ids[position[shift] + 1].clone()
    last = start + lens - 1 if select_index is None else select_index.to(torch.int64)
    input_ids[last[live]] = topk_index.reshape(-1)[: lens.numel()][live].to(input_ids.dtype)


FULL_MASK = 0
QLEN_ONLY = 1


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    tree_mask_mode: int,
) -> None:
    """Fill mask, positions and the links of R trees of n tokens, node 0 being the root.

    verified_seq_len: [R] tokens before the root. tree_mask: bool; mode 0 holds [n, len_r + n] per
    request, with the first len_r columns preset by the caller, mode 1 holds [n, n]. positions:
    [R * n]. retrieve_index: [R, n] flat node numbers. retrieve_next_token / _next_sibling: [R, n]
    first child and next sibling of each node, -1 for none.
    Raises NotImplementedError for a bit-packed mask.
    """
    if int(tree_mask_mode) not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(f"tree mask mode {int(tree_mask_mode)} has no CPU form")
    rows, n = verified_seq_len.numel(), int(draft_token_num)
    if int(topk) == 1:
        trees = [_chain(n)]  # the same for every request: broadcast below
    else:
        both = (each.reshape(rows, -1).tolist() for each in (selected_index, parent_list))
        trees = [_tree(s, p, int(topk), n) for s, p in zip(*both, strict=True)]
    depths, children, siblings, seen = (torch.stack(each) for each in zip(*trees, strict=True))
    positions.view(rows, n).copy_(verified_seq_len[:, None] + depths)  # [R, n], or [1, n]: chains
    retrieve_index.view(rows, n).copy_(torch.arange(rows * n).view(rows, n))
    retrieve_next_token.view(rows, n).copy_(children)
    retrieve_next_sibling.view(rows, n).copy_(siblings)
    visible = seen.expand(rows, n, n)
    if int(tree_mask_mode) == QLEN_ONLY:
        tree_mask.view(-1)[: rows * n * n].view(rows, n, n).copy_(visible)
    else:
        _fill_full_mask(tree_mask.view(-1), visible, verified_seq_len.tolist())


def _fill_full_mask(mask: Tensor, visible: Tensor, lengths: list[int]) -> None:
    """The last n columns of each request's block [n, len_r + n]; visible: [R, n, n]."""
    n, offset = visible.shape[1], 0
    for r, length in enumerate(lengths):
        block = mask[offset : offset + n * (length + n)].view(n, length + n)
        block[:, length:] = visible[r]
        offset += n * (length + n)


def verify_tree_greedy_cpu(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follow the child that equals the target's argmax as deep as it goes.

    predicts: [R * n] argmax written at accepted nodes. accept_index: [R, depth] flat node numbers,
    entries behind the last accepted one stay. accept_token_num: [R] accepted drafts.
    candidates: [R, n] tokens of the nodes. target_predict: [R, n] argmax after each node.
    """
    rows, depth = accept_index.shape
    flat_predict = target_predict.reshape(-1).to(torch.int64)
    tokens, child, sibling = (
        t.to(torch.int64) for t in (candidates, retrive_next_token, retrive_next_sibling)
    )
    row = torch.arange(rows)
    node = torch.zeros(rows, dtype=torch.int64)
    last = retrive_index[:, 0].to(torch.int64)  # [R] flat number of the last accepted node
    accepted = torch.zeros(rows, dtype=torch.int64)
    running = torch.ones(rows, dtype=torch.bool)
    accept_index[:, 0] = last.to(accept_index.dtype)
    for step in range(1, depth):
        choice = flat_predict[last]
        node = _sibling_with(choice, child[row, node], tokens, sibling, running)
        running &= node >= 0
        if not bool(running.any()):
            break
        node = node.clamp_min(0)
        predicts[last[running]] = choice[running].to(predicts.dtype)
        last = torch.where(running, retrive_index[row, node].to(torch.int64), last)
        accept_index[running, step] = last[running].to(accept_index.dtype)
        accepted += running
    accept_token_num.copy_(accepted)
    predicts[last] = flat_predict[last].to(predicts.dtype)


def _sibling_with(
    choice: Tensor, node: Tensor, tokens: Tensor, sibling: Tensor, running: Tensor
) -> Tensor:
    """[R] the node or the sibling behind it whose token is the choice, -1 for none.

    choice: [R] tokens. node: [R] first children. tokens, sibling: [R, n]. Rows that are not
    running stay as they are.
    """
    row = torch.arange(len(node))
    while True:
        wrong = running & (node >= 0) & (tokens[row, node.clamp_min(0)] != choice)
        if not bool(wrong.any()):
            return node
        node = torch.where(wrong, sibling[row, node.clamp_min(0)], node)


# Of a tree: depth [n], first child [n], next sibling [n], visible [n, n] (ancestor or self).
_Links = tuple[Tensor, Tensor, Tensor, Tensor]


@lru_cache(maxsize=32)
def _chain(n: int) -> _Links:
    following = torch.arange(1, n + 1)
    following[-1] = -1
    visible = torch.ones(n, n, dtype=torch.bool).tril()
    return torch.arange(n), following, torch.full((n,), -1), visible


def _tree(selected: list[int], parent_list: list[int], topk: int, n: int) -> _Links:
    """Links of the tree over the root and the n - 1 candidates in `selected`."""
    node_of = {candidate: i + 1 for i, candidate in enumerate(selected)}
    parents: list[int | None] = [None]
    for candidate in selected:
        group = candidate // topk
        parents.append(0 if group == 0 else node_of.get(parent_list[group]))
    child, sibling = [-1] * n, [-1] * n
    for node in range(n - 1, 0, -1):  # backwards, so that the first child comes out in front
        parent = parents[node]
        if parent is not None:
            sibling[node], child[parent] = child[parent], node
    visible = torch.eye(n, dtype=torch.bool)
    visible[:, 0] = True
    for node in range(1, n):
        parent = parents[node]
        if parent is not None:
            visible[node] |= visible[parent]
    return visible.sum(1) - 1, torch.tensor(child), torch.tensor(sibling), visible
