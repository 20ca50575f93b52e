"""The accept rules over packed rows (paper, 3.1), with plain decoding's own law for sampling.

Upstream's rules (kernels/ops/speculative/dspark/dspark_accept.py, 0.5.23) run over windows of
gamma + 1 whatever was verified and cut afterwards. Here a request's last verified row gives the
bonus token straight from the target's law, so nothing behind it is read: neither rows that were
not verified nor drafts that were not made.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dspark.serving.cpu.ragged_ops import accept_greedy
from sglang_dspark.serving.cpu.target_law import target_law
from sglang_dspark.verify.rejection import accept_sampled


def accept(
    window: Tensor,
    lens: Tensor,
    starts: Tensor,
    logits: Tensor,
    draft_block: Any,
    sampling_info: Any,
) -> tuple[Tensor, Tensor]:
    """Accepted drafts [R] int32 and the next token [R] int64 of each request.

    window: [R, gamma + 1] int64, anchor and drafts. lens, starts: [R] int64, tokens verified and
    first row of each request in logits [N, V]. draft_block: upstream's `DraftBlockResult`; its
    logits, where there are any, cover at least the drafts that were verified.
    """
    logits = logits.float().contiguous()  # nothing is copied where it is already
    if sampling_info is None or sampling_info.is_all_greedy:
        return accept_greedy(window, lens, starts, logits)
    sampled = _sampled(window, lens, starts, logits, draft_block, sampling_info)
    if not sampling_info.is_any_greedy:
        return sampled
    greedy = accept_greedy(window, lens, starts, logits)
    chosen = draft_block.greedy_mask
    return torch.where(chosen, greedy[0], sampled[0]), torch.where(chosen, greedy[1], sampled[1])


def _sampled(
    window: Tensor,
    lens: Tensor,
    starts: Tensor,
    logits: Tensor,
    draft_block: Any,
    sampling_info: Any,
) -> tuple[Tensor, Tensor]:
    requests, width = len(lens), int(lens.max())
    probs = torch.zeros(requests, width, logits.shape[1])
    at = torch.arange(width)[None, :] < lens[:, None]  # [R, width]
    rows = (starts[:, None] + torch.arange(width))[at]  # [B]
    probs[at] = target_law(logits[rows], sampling_info, lens)
    drafts = window[:, 1:width]
    draft_probs = None
    if not draft_block.greedy_draft and width > 1:
        heat = draft_block.temperatures.reshape(-1, 1, 1)
        draft_probs = torch.softmax(draft_block.corrected_logits[:, : width - 1] / heat, dim=-1)
    outcome = accept_sampled(
        draft=drafts,
        draft_probs=draft_probs,
        target_probs=probs,
        accept_uniforms=torch.rand(requests, width - 1),
        bonus_uniforms=torch.rand(requests),
        verify_lens=lens - 1,
    )
    return outcome.accepted.to(torch.int32), outcome.bonus
