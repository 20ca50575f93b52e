"""Verify sampled chains of EAGLE and DFLASH in torch, where SGLang has Triton and CUDA operators.

Upstream: `eagle_sample` (sglang/srt/speculative/eagle_utils.py) and the operators of
sglang/kernels/ops/speculative/verify_sampling.py. The rule is `verify.accept_sampled`. R requests,
n nodes a chain, of which the first is the anchor, V tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu import accept
from sglang_dspark.serving import upstream
from sglang_dspark.verify import accept_sampled


def sample_windows(
    verify_input: Any, sampling_info: Any, logits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Verify EAGLE's sampled chains by plain decoding's distribution.

    verify_input: upstream's `EagleVerifyInput`. logits: [R * n, V], with all adjustments.
    Returns tokens by flat node number [R * n], tokens that a request gains [R], and flat numbers of
    the accepted nodes [R, n], -1 after them; all int32.
    """
    n = verify_input.draft_token_num
    window = verify_input.draft_token.view(-1, n).to(torch.int64)
    rows, nodes = len(window), verify_input.retrieve_index.to(torch.int64)
    probs = accept.build_target_probs(
        next_token_logits=logits, sampling_info=sampling_info, draft_token_num=n, bs=rows
    )
    predicts = torch.zeros(rows * n, dtype=torch.int32)
    index = torch.full((rows, n), -1, dtype=torch.int32)
    proposed = None  # drafts are the draft model's likeliest tokens
    if upstream.get_spec().speculative_use_rejection_sampling:
        proposed = verify_input.draft_probs[:, : n - 1]
    accepted = _accept(window, nodes, proposed, probs, predicts, index)
    return predicts, accepted.to(torch.int32) + 1, index


def chain_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Replace upstream's `tree_speculative_sampling_target_only` for DFLASH's greedy chains.

    Writes predicts [R * n], accept_index [R, n] and accept_token_num [R]. candidates,
    retrive_index: [R, n]; target_probs: [R, n, V]. Others are not read: a chain's links are known,
    and upstream's float32 uniforms would accept a draft of any probability once in 2^24.
    """
    nodes = retrive_index.to(torch.int64)
    accepted = _accept(candidates, nodes, None, target_probs, predicts, accept_index)
    accept_token_num.copy_(accepted)


def _accept(
    window: Tensor,
    nodes: Tensor,
    proposed: Tensor | None,
    probs: Tensor,
    predicts: Tensor,
    index: Tensor,
) -> Tensor:
    """Accept drafts, [R] int64; write the accepted nodes to index [R, n], their tokens to predicts.

    proposed: [R, n - 1, V], the drafts' distributions; None: they are the likeliest tokens.
    """
    rows, n = window.shape
    drafts, coins = window[:, 1:], torch.rand(rows, n, dtype=torch.float64)
    outcome = accept_sampled(drafts, proposed, probs, coins[:, 1:], coins[:, 0])
    kept = torch.arange(n) <= outcome.accepted[:, None]  # [R, n], the anchor included
    index.copy_(torch.where(kept, nodes, -1))
    predicts[nodes[kept]] = outcome.tokens(drafts)[kept].to(predicts.dtype)
    return outcome.accepted
