"""Apply the accept rules over packed rows (paper, 3.1), with plain decoding's distribution.

Upstream's rules (kernels/ops/speculative/dspark/dspark_accept.py) run over windows of gamma + 1 and
cut afterwards. Here rows that were not verified and drafts that were not made are never read.

The distribution replaces `build_speculative_verify_target_probs`
(sglang/srt/speculative/dflash_utils.py), which ignores min-p and normalises between top-k and
top-p, unlike plain decoding's sampler (srt/layers/sampler.py,
`top_k_top_p_min_p_sampling_from_probs_torch`).

A row of invalid logits gets token 0 and a line in the log. It occurs where a grammar and
`min_new_tokens` together mask every token, or where a model overflows. Softmax makes such a row
NaN, and drawing from it raises, which ends the server. Greedy decoding too returns token 0 for a
completely masked row: a grammar then refuses it, and ends only that request
(patches/upstream_fixes/grammar_errors.py).

Sampled chains of EAGLE and DFLASH, for which SGLang has Triton and CUDA operators, follow the same
rules: `eagle_sample` (sglang/srt/speculative/eagle_utils.py) and
sglang/kernels/ops/speculative/verify_sampling.py.
"""

from __future__ import annotations

import logging
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.backends.cpu.greedy_ops import accept_greedy
from sglang_dspark.backends.cpu.jit import kernel
from sglang_dspark.backends.cpu.seeded_ops import choose
from sglang_dspark.serving import upstream
from sglang_dspark.serving.config import current_config
from sglang_dspark.step.accept import Rule, either, judge
from sglang_dspark.step.seeds import Seeds
from sglang_dspark.verify import BatchSampling, target_distribution
from sglang_dspark.verify.acceptance import Acceptance
from sglang_dspark.verify.block import accept_block
from sglang_dspark.verify.rejection import accept_sampled

logger = logging.getLogger(__name__)


def accept(
    window: Tensor,
    lens: Tensor,
    starts: Tensor,
    logits: Tensor,
    draft_block: Any,
    sampling_info: Any,
    anchors: Tensor,
    seeds: Seeds | None = None,
) -> tuple[Tensor, Tensor]:
    """Accept drafts: number [R] int32 and next token [R] int64 of each request.

    window: [R, gamma + 1] int64, anchor and drafts. lens, starts: [R] int64, tokens verified and
    first row of each request in logits [N, V]. draft_block: upstream's `DraftBlockResult`; its
    logits, if any, cover at least the drafts that were verified. anchors: [R] positions of the
    anchors, which with a request's seed determine its tokens. seeds: of the sampled requests that
    have one.
    """
    logits = logits.float().contiguous()  # no copy if they already are
    if sampling_info is None or sampling_info.is_all_greedy:
        return accept_greedy(window, lens, starts, logits)
    probs = _target_probs(lens, starts, logits, sampling_info)
    drafts = window[:, 1 : probs.shape[1]]
    outcome = judge(
        sampled_rule(), drafts, lens - 1, probs, draft_block, anchors, seeds, choose, checked=True
    )
    if sampling_info.is_any_greedy:
        greedy = Acceptance(*accept_greedy(window, lens, starts, logits))
        outcome = either(draft_block.greedy_mask, greedy, outcome)
    return outcome.accepted.to(torch.int32), outcome.bonus


def agreed(outcome: Tensor, tp_sync: Any) -> Any:
    """Broadcast rank 0's outcome in place: each rank draws its own random numbers."""
    return tp_sync.sync(upstream.SpecTpSyncSite.DSPARK_ACCEPT_SAMPLE, outcome)


def _target_probs(lens: Tensor, starts: Tensor, logits: Tensor, sampling_info: Any) -> Tensor:
    """Compute the distribution of every verified row: [R, max(lens), V], 0 elsewhere."""
    width = int(lens.max())
    probs = torch.zeros(len(lens), width, logits.shape[1])
    at = torch.arange(width)[None, :] < lens[:, None]  # [R, width]
    rows = (starts[:, None] + torch.arange(width))[at]  # [B]
    probs[at] = sampling_probs(logits[rows], sampling_info, lens)
    return probs


@cache
def sampled_rule() -> Rule:
    """Return the accept rule of sampled requests without a seed (`verify.rule`)."""
    by_token = current_config().verify.rule == "token"
    return accept_sampled if by_token else partial(accept_block, walked=walk)


def sampling_probs(logits: Tensor, sampling_info: Any, rows: int | Tensor) -> Tensor:
    """Compute the probabilities of each row's next token: [B, V] -> [B, V] float32.

    sampling_info: SGLang's `SamplingBatchInfo` of R requests; greedy ones have top-k 1 there.
    rows: number of rows of each request, one number or [R] int64; requests in order.
    """
    settings = BatchSampling(
        temperature=_by_row(sampling_info.temperatures, rows),
        top_k=_by_row(sampling_info.top_ks, rows),
        top_p=_by_row(sampling_info.top_ps, rows),
        min_p=_by_row(sampling_info.min_ps, rows),
    )
    return replace_nan_rows(target_distribution(logits[:, None], settings)[:, 0])


def _by_row(values: Tensor, rows: int | Tensor) -> Tensor:
    return values.reshape(-1).repeat_interleave(rows, 0)


def build_target_probs(
    *,
    next_token_logits: Tensor,
    sampling_info: Any,
    draft_token_num: int,
    bs: int,
    max_top_k: int | None = None,
    uniform_top_k_value: int | None = None,
    use_sparse_topk: bool = True,
) -> Tensor:
    """Replace upstream's function: [bs * draft_token_num, V] -> [bs, draft_token_num, V] float32.

    The last three arguments are hints for upstream's sort; they are ignored.
    """
    probs = sampling_probs(next_token_logits, sampling_info, draft_token_num)
    return probs.view(bs, draft_token_num, -1)


def replace_nan_rows(probs: Tensor) -> Tensor:
    """Give token 0 probability 1 in rows of NaN; probs [N, V] is changed in place."""
    invalid = probs[:, 0].isnan()  # a row has only NaN or no NaN: it was divided by its sum
    if bool(invalid.any()):
        _warn_of_nan()
        probs[invalid] = 0.0
        probs[invalid, 0] = 1.0
    return probs


@cache
def _warn_of_nan() -> None:
    """Log it once: a model that overflows does so in every step."""
    logger.error(
        "sglang-dspark: logits of a request are no distribution (NaN, or every token is masked); "
        "token 0 is taken, here and wherever it happens again"
    )


def sample_windows(
    verify_input: Any, sampling_info: Any, logits: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Verify EAGLE's sampled chains of n nodes, an anchor first, by plain decoding's distribution.

    verify_input: upstream's `EagleVerifyInput`. logits: [R * n, V], with all adjustments.
    Returns tokens by flat node number [R * n], tokens that a request gains [R], and flat numbers of
    the accepted nodes [R, n], -1 after them; all int32.
    """
    n = verify_input.draft_token_num
    window = verify_input.draft_token.view(-1, n).to(torch.int64)
    rows, nodes = len(window), verify_input.retrieve_index.to(torch.int64)
    probs = sampling_probs(logits, sampling_info, n).view(rows, n, -1)
    predicts = torch.zeros(rows * n, dtype=torch.int32)
    index = torch.full((rows, n), -1, dtype=torch.int32)
    proposed = None  # drafts are the draft model's likeliest tokens
    if upstream.get_spec().speculative_use_rejection_sampling:
        proposed = verify_input.draft_probs[:, : n - 1]
    accepted = _accept_chains(window, nodes, proposed, probs, predicts, index)
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
    accepted = _accept_chains(candidates, nodes, None, target_probs, predicts, accept_index)
    accept_token_num.copy_(accepted)


def _accept_chains(
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


_LANES = 256  # concurrent sums: enough for a loop over them to use vector registers


@kernel
def _residual_mass(target, chance, proposal):  # type: ignore[no-untyped-def]
    """Sum max(chance * target(x) - proposal(x), 0) over x (S_i of a row) in _LANES sums."""
    lanes, whole = np.zeros(_LANES), len(target) // _LANES * _LANES
    for start in range(0, whole, _LANES):
        for lane in range(_LANES):
            v = start + lane
            lanes[lane] += max(chance * np.float64(target[v]) - np.float64(proposal[v]), 0.0)
    for v in range(whole, len(target)):
        lanes[v - whole] += max(chance * np.float64(target[v]) - np.float64(proposal[v]), 0.0)
    return lanes.sum()


@kernel
def _walk(draft, proposals, targets, uniforms, limits, accepted, chances):  # type: ignore[no-untyped-def]
    standing = np.ones(draft.shape[1] + 1)  # p_0 .. p_l
    for r in range(draft.shape[0]):
        length = limits[r]
        for i in range(length):
            mass = standing[i] * np.float64(targets[r, i, draft[r, i]])
            proposed = np.float64(proposals[r, i, draft[r, i]])
            enough = 1.0 if mass > 0 else 0.0
            standing[i + 1] = mass / proposed if mass < proposed else enough
        kept = 0
        for i in range(length, 0, -1):
            p, u = standing[i], uniforms[r, i - 1]
            if i == length:
                stands = u < p
            else:
                left = _residual_mass(targets[r, i], p, proposals[r, i])
                refused = left + (1.0 - p)
                stands = u * refused < left or refused == 0
            if stands:
                kept = i
                break
        accepted[r] = kept
        chances[r] = standing[kept]


def walk(
    draft: Tensor, draft_probs: Tensor, target_probs: Tensor, uniforms: Tensor, limits: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute `verify.block.walk` in one compiled loop; float64 sums in another order.

    draft: [R, gamma] int64. draft_probs: [R, gamma, V], target_probs: [R, gamma + 1, V] float32.
    uniforms: [R, gamma] float64. limits: [R] int64. Returns accepted [R] int64, p_tau [R] float64.
    """
    accepted = torch.empty(len(draft), dtype=torch.int64)
    chances = torch.empty(len(draft), dtype=torch.float64)
    given = draft, draft_probs, target_probs, uniforms, limits, accepted, chances
    _walk(*(each.contiguous().numpy() for each in given))
    return accepted, chances
