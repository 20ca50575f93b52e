"""Implement SGLang's sampling-verify operators in torch.

Replace the Triton and CUDA operators named in sglang/kernels/ops/speculative/
{verify_sampling,reject_sampling}.py and kernels/ops/sampling/renorm.py. The chain rule is
`verify.accept_sampled`; trees follow upstream's target-only rule. R requests, n nodes a tree, the
first node being the anchor, V tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dspark.verify import accept_sampled, sample_inverse_cdf


def chain_speculative_sampling(
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
    threshold_single: float,
    threshold_acc: float,
    deterministic: bool,
    *,
    block_verification: bool = False,
) -> None:
    """Chain rejection sampling; writes predicts, accept_index and accept_token_num in place.

    predicts: [R * n] tokens by flat node number. accept_index: [R, n] flat numbers of the anchor
    and the accepted drafts. accept_token_num: [R] accepted drafts. candidates: [R, n] anchor and
    drafts. uniform_samples: [R, n - 1 or n]. target_probs: [R, n, V]; draft_probs: [R, n - 1 or
    n, V], the distribution each draft was sampled from. Thresholds belong to other rules and are
    not read.
    Raises NotImplementedError for block verification, which SGLang refuses on a CPU itself.
    """
    if block_verification:
        raise NotImplementedError("block verification has no CPU operator")
    n = candidates.shape[1]
    drafts = candidates[:, 1:].to(torch.int64)
    coins, last = _finer(uniform_samples[:, : n - 1]), _finer(uniform_samples_for_final_sampling)
    outcome = accept_sampled(drafts, draft_probs[:, : n - 1], target_probs, coins, last)
    accept_token_num.copy_(outcome.accepted)
    kept = torch.arange(n)[None, :] <= outcome.accepted[:, None]  # [R, n], the anchor included
    nodes = retrive_index.to(torch.int64)  # [R, n]
    accept_index[:, :n] = torch.where(kept, nodes, accept_index[:, :n]).to(accept_index.dtype)
    predicts[nodes[kept]] = outcome.tokens(drafts)[kept].to(predicts.dtype)


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
    for r in range(candidates.shape[0]):
        _walk_tree(
            r,
            predicts,
            accept_index,
            accept_token_num,
            candidates[r].tolist(),
            retrive_index[r].tolist(),
            retrive_next_token[r].tolist(),
            retrive_next_sibling[r].tolist(),
            _finer(uniform_samples[r]).tolist(),
            _finer(uniform_samples_for_final_sampling[r : r + 1]),
            target_probs[r],
            draft_probs[r],
            (float(threshold_single), max(float(threshold_acc), 1e-9)),
        )


def _finer(uniforms: Tensor) -> Tensor:
    """Fill in the bits below 2^-24 of upstream's float32 uniforms.

    A uniform of exactly 0, one in 2^24, would keep a draft of any probability above 0.
    """
    return uniforms.double() + torch.rand_like(uniforms, dtype=torch.float64) * 2.0**-24


def _walk_tree(
    r: int,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    tokens: list[int],
    numbers: list[int],
    child: list[int],
    sibling: list[int],
    coins: list[float],
    final_coin: Tensor,
    target: Tensor,
    refused: Tensor,
    thresholds: tuple[float, float],
) -> None:
    """Descend the tree of one request; target and refused are [n, V]."""
    node = accepted = 0
    coin = coins[0]
    accept_index[r, 0] = numbers[0]
    limit = accept_index.shape[1] - 1
    while accepted < limit:
        candidate = _kept_child(
            child[node], tokens, sibling, coin, target[node], refused[node], thresholds
        )
        if candidate == -1:
            break
        predicts[numbers[node]] = tokens[candidate]
        node, coin = candidate, coins[candidate]
        accepted += 1
        accept_index[r, accepted] = numbers[node]
    accept_token_num[r] = accepted
    weights = target[node]
    if accepted < limit:
        rest = (weights - refused[node]).clamp_min(0)
        weights = rest if bool(rest.sum() > 0) else weights
    predicts[numbers[node]] = sample_inverse_cdf(weights[None], final_coin)[0].to(predicts.dtype)


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


def top_k_renorm_prob(probs: Tensor, top_ks: Any) -> Tensor:
    """Keep each row's top_ks [N] largest probabilities and renormalise; probs [N, V] float32.

    Of equal probabilities at the cut the one `topk` returns first stays, as in upstream's samplers.
    """
    vocab = probs.shape[-1]
    limit = torch.as_tensor(top_ks).reshape(-1).to(torch.int64).clamp(1, vocab)  # [N] or [1]
    width = int(limit.max())
    if width == vocab and int(limit.min()) == vocab:
        return probs / probs.sum(-1, keepdim=True)
    values, index = torch.topk(probs, width, dim=-1)  # [N, width]
    values = values.masked_fill(torch.arange(width)[None, :] >= limit[:, None], 0.0)
    kept = torch.zeros_like(probs).scatter_(1, index, values)
    return kept / kept.sum(-1, keepdim=True)


def top_p_renorm_prob(probs: Tensor, top_ps: Any) -> Tensor:
    """Keep the smallest leading set of each row whose mass reaches top_ps [N], renormalised."""
    ordered, index = probs.sort(-1, descending=True)
    ahead = ordered.cumsum(-1) - ordered  # mass in front of each candidate
    limit = torch.as_tensor(top_ps).reshape(-1, 1).to(probs.dtype)
    ordered = ordered.masked_fill(ahead > limit, 0.0)
    kept = torch.zeros_like(probs).scatter_(1, index, ordered)
    return kept / kept.sum(-1, keepdim=True)
