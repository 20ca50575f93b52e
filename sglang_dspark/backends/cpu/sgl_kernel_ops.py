"""Implement in torch the operators that SGLang imports from the CPU build of `sgl_kernel`.

Upstream call sites: sglang/kernels/ops/kvcache/cache_move.py, kernels/ops/speculative/
{cache_locs,eagle,multi_layer_eagle,spec_tree}.py, srt/mem_cache/allocation.py. Names, argument
order and in-place results are upstream's. R requests, n tokens in a drafted chain (EAGLE with topk
1, as in MTP-1).
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

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
    """Move cache rows src_loc -> tgt_loc in every buffer; all reads precede the writes.

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
    """Write req_to_token[row_r, start_r:end_r] = the next end_r - start_r of out_cache_loc."""
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
    """Fill out_cache_loc [R * topk * steps] with the slots after each request's seq_len tokens."""
    width = int(topk) * int(speculative_num_steps)
    column = seq_lens.to(torch.int64)[:, None] + torch.arange(width)  # [R, width]
    slots = req_to_token[req_pool_indices.to(torch.int64)[:, None], column]
    out_cache_loc.copy_(slots.reshape(-1))


def fill_bonus_tokens_cpu(
    accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor, accept_stride: int
) -> None:
    """Set bonus_tokens[r] to the last of accept_lens[r] tokens in row r of [R, stride]."""
    last = accept_lens.to(torch.int64) - 1
    last += torch.arange(accept_lens.numel()) * int(accept_stride)
    bonus_tokens.copy_(accept_tokens.reshape(-1)[last])


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """Compact the cache slots of accepted tokens; accept_index is -1 for rejected ones."""
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


QLEN_ONLY = 1  # the mask of a request's own tokens; SGLang's default on a CPU


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
    """Fill mask, positions and the links of R chains of n tokens; node 0 is the root.

    verified_seq_len: [R] tokens before the root. tree_mask: bool, [n, n] a request. positions: [R *
    n]. retrieve_index: [R, n] flat node numbers. retrieve_next_token: [R, n] the node after each,
    -1 for none. Raises NotImplementedError for another mask; wider trees are refused at the start
    (patches/cpu/arguments.py).
    """
    if int(tree_mask_mode) != QLEN_ONLY:
        raise NotImplementedError(f"tree mask mode {int(tree_mask_mode)} has no CPU form")
    rows, n = verified_seq_len.numel(), int(draft_token_num)
    following, visible = _chain(n)
    positions.view(rows, n).copy_(verified_seq_len[:, None] + torch.arange(n))
    retrieve_index.view(rows, n).copy_(torch.arange(rows * n).view(rows, n))
    retrieve_next_token.view(rows, n).copy_(following)
    retrieve_next_sibling.fill_(-1)
    tree_mask.view(-1)[: rows * n * n].view(rows, n, n).copy_(visible)


@lru_cache(maxsize=32)
def _chain(n: int) -> tuple[Tensor, Tensor]:
    """Return the node after each [n], and the nodes that each sees [n, n]."""
    following = torch.arange(1, n + 1)
    following[-1] = -1
    return following, torch.ones(n, n, dtype=torch.bool).tril()


def verify_tree_greedy_cpu(*unused: Any, **named: Any) -> None:
    """Raise NotImplementedError; exists only to be imported: patches/cpu/mtp.py accepts chains."""
    raise NotImplementedError("sglang-dspark verifies no draft trees on a CPU")
