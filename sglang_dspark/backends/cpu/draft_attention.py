"""Attention of EAGLE's drafting steps beyond the first: chains and trees of topk branches.

Adapts the multi-step draft backends of sglang/srt/layers/attention: a container with one
backend for each step. Branch t of request r keeps its drafts in the slots seq_len + t * steps
onwards of the request's row; a table of its own per branch lets the ordinary kernel read them.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend
from sglang_dspark.backends.cpu.plan import make_plan


class DsparkCpuDraftStepBackend(DsparkCpuAttnBackend):
    """One drafting step; the container makes its plan."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """The plan of this step is set by `DsparkCpuMultiStepDraftBackend`."""


class DsparkCpuMultiStepDraftBackend:
    """`attn_backends[s]` serves step s; the last of `speculative_num_steps` needs no pass."""

    def __init__(self, runner: Any, topk: int, speculative_num_steps: int):
        self.topk = topk
        self.speculative_num_steps = speculative_num_steps
        self.attn_backends = [
            DsparkCpuDraftStepBackend(runner) for _ in range(speculative_num_steps - 1)
        ]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """seq_lens [R] count the tokens before the first draft; branches are R * topk queries."""
        pool = self.attn_backends[0].req_to_token_pool.req_to_token
        table = branch_table(
            pool,
            forward_batch.req_pool_indices.to(torch.int64),
            forward_batch.seq_lens.to(torch.int64),
            self.topk,
            self.speculative_num_steps,
        )
        rows = torch.arange(table.shape[0])
        lens = forward_batch.seq_lens.to(torch.int64).repeat_interleave(self.topk)
        for step, backend in enumerate(self.attn_backends):
            ones = torch.ones_like(lens)
            backend.plan = make_plan(table, rows, ones, lens + step + 1)


def branch_table(
    req_to_token: torch.Tensor,
    req_rows: torch.Tensor,
    seq_lens: torch.Tensor,
    topk: int,
    steps: int,
) -> torch.Tensor:
    """Slots by position for each branch: [R * topk, max seq_len + steps].

    The first seq_lens[r] entries are the request's own, then the branch's drafts follow.
    """
    width = int(seq_lens.max()) + steps if seq_lens.numel() else steps
    position = torch.arange(width)[None, None, :]  # [1, 1, width]
    branch = torch.arange(topk)[None, :, None]  # [1, topk, 1]
    length = seq_lens[:, None, None]  # [R, 1, 1]
    source = torch.where(position < length, position, position + branch * steps)
    source = source.clamp(max=req_to_token.shape[1] - 1)
    slots = req_to_token[req_rows[:, None, None], source]  # [R, topk, width]
    return slots.reshape(-1, width)
