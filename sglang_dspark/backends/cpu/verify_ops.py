"""Verify sampled drafts of EAGLE and DFLASH in torch, where SGLang has Triton and CUDA operators.

Upstream: `eagle_sample` (sglang/srt/speculative/eagle_utils.py) and the operators of
sglang/kernels/ops/speculative/verify_sampling.py. The chain rule is `verify.accept_sampled`; trees
follow upstream's target-only rule. R requests, n nodes a tree, the first node being the anchor, V
tokens.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu import accept
from sglang_dspark.serving import upstream
from sglang_dspark.verify import accept_sampled, sample_inverse_cdf


def sample_windows(
    verify_input: Any, sampling_info: Any, logits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Verify EAGLE's sampled chains, or trees, by plain decoding's distribution.

    verify_input: upstream's `EagleVerifyInput`. logits: [R * n, V], all adjustments made.
    Returns tokens by flat node number [R * n], tokens a request gains [R], and flat numbers of the
    accepted nodes [R, depth], -1 behind them; all int32.
    """
    spec, n = upstream.get_spec(), verify_input.draft_token_num
    window = verify_input.draft_token.view(-1, n).to(torch.int64)
    rows, nodes = len(window), verify_input.retrieve_index.to(torch.int64)
    probs = accept.build_target_probs(
        next_token_logits=logits, sampling_info=sampling_info, draft_token_num=n, bs=rows
    )
    predicts = torch.zeros(rows * n, dtype=torch.int32)
    index = torch.full((rows, verify_input.max_tree_depth), -1, dtype=torch.int32)
    if spec.speculative_use_rejection_sampling:
        coins = torch.rand(rows, n, dtype=torch.float64)
        drafts, draft_probs = window[:, 1:], verify_input.draft_probs[:, : n - 1]
        outcome = accept_sampled(drafts, draft_probs, probs, coins[:, 1:], coins[:, 0])
        kept = torch.arange(n) <= outcome.accepted[:, None]  # [R, n], the anchor included
        index[:, :n] = torch.where(kept, nodes, -1)
        predicts[nodes[kept]] = outcome.tokens(drafts)[kept].to(torch.int32)
        return predicts, outcome.accepted.to(torch.int32) + 1, index
    accepted = torch.empty(rows, dtype=torch.int32)
    links = (nodes, verify_input.retrieve_next_token, verify_input.retrieve_next_sibling)
    tree_speculative_sampling_target_only(
        predicts, index, accepted, window, *links, torch.rand(rows, n), torch.rand(rows), probs,
        torch.zeros_like(probs), spec.speculative_accept_threshold_single,
        spec.speculative_accept_threshold_acc,
    )  # fmt: skip
    return predicts, accepted + 1, index


def tree_speculative_sampling_target_only(
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
    """Verify trees by upstream's rule: try children in turn against the target's own mass.

    draft_probs: [R, n, V] scratch of zeros, receives the mass of refused children. With both
    thresholds 1 the output follows the target's distribution.
    """
    thresholds = float(threshold_single), max(float(threshold_acc), 1e-9)
    limit = accept_index.shape[1] - 1
    lists = (candidates, retrive_index, retrive_next_token, retrive_next_sibling)
    for r, (target, refused) in enumerate(zip(target_probs, draft_probs, strict=True)):  # [n, V]
        tokens, numbers, child, sibling = (each[r].tolist() for each in lists)
        coins = _finer(uniform_samples[r]).tolist()
        final_coin = _finer(uniform_samples_for_final_sampling[r : r + 1])
        path = _kept_path((tokens, child, sibling), coins, target, refused, thresholds, limit)
        for depth, node in enumerate(path):
            accept_index[r, depth] = numbers[node]
        for node, following in pairwise(path):
            predicts[numbers[node]] = tokens[following]
        accept_token_num[r] = len(path) - 1
        weights = target[path[-1]]
        if len(path) <= limit:
            rest = (weights - refused[path[-1]]).clamp_min(0)
            weights = rest if bool(rest.sum() > 0) else weights
        drawn = sample_inverse_cdf(weights[None], final_coin)[0]
        predicts[numbers[path[-1]]] = drawn.to(predicts.dtype)


def _finer(uniforms: Tensor) -> Tensor:
    """Fill in the bits below 2^-24 of upstream's float32 uniforms.

    A uniform of exactly 0, one in 2^24, would keep a draft of any probability above 0.
    """
    return uniforms.double() + torch.rand_like(uniforms, dtype=torch.float64) * 2.0**-24


def _kept_path(
    links: tuple[list[int], list[int], list[int]],
    coins: list[float],
    target: Tensor,
    refused: Tensor,
    thresholds: tuple[float, float],
    limit: int,
) -> list[int]:
    """Descend a tree: return its kept nodes, the anchor first; target and refused are [n, V].

    links: tokens, first child and next sibling of each node. limit: most nodes after the anchor.
    """
    tokens, child, sibling = links
    path = [0]
    while len(path) <= limit:
        node = path[-1]
        given = child[node], tokens, sibling, coins[node], target[node], refused[node]
        candidate = _kept_child(*given, thresholds)
        if candidate == -1:
            break
        path.append(candidate)
    return path


def _kept_child(
    candidate: int,
    tokens: list[int],
    sibling: list[int],
    coin: float,
    target: Tensor,
    refused: Tensor,
    thresholds: tuple[float, float],
) -> int:
    """Return the first accepted child from `candidate` on, or -1; target and refused are [V]."""
    single, accumulated = thresholds
    mass = 0.0
    while candidate != -1:
        token = tokens[candidate]
        probability = float(target[token])
        mass += probability
        if coin < mass / accumulated or probability >= single:
            return candidate
        refused[token] = target[token]
        candidate = sibling[candidate]
    return -1
