"""SGLang's sampled accept operators on CPU: its calling convention around our accept rule.

The maths is in `sglang_dspark/verify/`; here tensors of R chains of n = gamma + 1 nodes are taken
apart and the results written where upstream reads them (predicts, accept_index, accept_token_num).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dspark.errors import DSparkError
from sglang_dspark.verify.acceptance import Acceptance
from sglang_dspark.verify.rejection import accept_sampled


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
    """Chain rejection sampling with the draft's probabilities.

    candidates [R, n] (anchor first), target_probs [R, n, V], draft_probs [R, >= n-1, V],
    uniform_samples [R, >= n-1]. Draft probabilities outside [0, 1] (rows that upstream leaves
    unwritten) count as 0.
    """
    if block_verification:
        raise DSparkError(
            "block verification is not available on CPU; leave out "
            "--speculative-dspark-enable-block-verification"
        )
    gamma = candidates.shape[1] - 1
    draft = candidates[:, 1:].long()
    law = draft_probs[:, :gamma]
    law = torch.where((law >= 0) & (law <= 1), law, 0.0)
    outcome = accept_sampled(
        draft,
        law,
        target_probs,
        _never_accept_impossible(uniform_samples[:, :gamma], law, draft),
        uniform_samples_for_final_sampling,
    )
    _write(outcome, draft, retrive_index, predicts, accept_index, accept_token_num)


def chain_sampling_target_only(
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
    """Sampling for drafts that were chosen without randomness: their law is one-hot.

    Arguments as above; draft_probs is scratch space upstream and not read. Only chains: a tree
    (topk > 1) and thresholds below 1, which would change the output's law, are refused.
    """
    if threshold_single < 1.0 or threshold_acc < 1.0:
        raise DSparkError(
            "accept thresholds below 1 change the output; remove "
            "--speculative-accept-threshold-single and --speculative-accept-threshold-acc"
        )
    if bool((retrive_next_sibling >= 0).any()):
        raise DSparkError(
            "sampling over a draft tree is not available on CPU; use --speculative-eagle-topk 1"
        )
    draft = candidates[:, 1:].long()
    outcome = accept_sampled(
        draft,
        None,
        target_probs,
        uniform_samples[:, : draft.shape[1]],
        uniform_samples_for_final_sampling,
    )
    _write(outcome, draft, retrive_index, predicts, accept_index, accept_token_num)


def _never_accept_impossible(uniforms: Tensor, law: Tensor, draft: Tensor) -> Tensor:
    """Uniforms [R, gamma] for `accept_sampled`, infinite where the draft's own probability is 0.

    A token that its draft cannot have drawn tells nothing (0 < p_t would accept it); upstream
    rejects it, and then the residual is p_t.
    """
    mass = law.gather(2, draft[:, :, None])[:, :, 0]
    return torch.where(mass > 0, uniforms, torch.nan)


def _write(
    outcome: Acceptance,
    draft: Tensor,
    retrive_index: Tensor,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
) -> None:
    """Write accepted drafts, then the bonus, at the nodes where upstream reads them."""
    rows, gamma = draft.shape
    index = retrive_index.long()  # [R, n]
    steps = torch.arange(gamma + 1)
    kept = steps <= outcome.accepted[:, None]  # [R, n]
    previous = accept_index[:, : gamma + 1].long()
    chosen = torch.where(kept, index, previous)
    accept_index[:, : gamma + 1] = chosen.to(accept_index.dtype)
    accept_token_num.copy_(outcome.accepted.to(accept_token_num.dtype))
    drafted = steps[:gamma] < outcome.accepted[:, None]  # [R, gamma]
    predicts[index[:, :gamma][drafted]] = draft[drafted].to(predicts.dtype)
    last = index[torch.arange(rows), outcome.accepted]
    predicts[last] = outcome.bonus.to(predicts.dtype)
