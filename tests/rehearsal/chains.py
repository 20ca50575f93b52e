"""The sampled rule of upstream's executor in torch, where it has a Triton kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dspark.backends.cpu.accept import build_target_probs
from sglang_dspark.patches.seam import Seams
from sglang_dspark.verify import accept_sampled

_RULE = "sglang.kernels.ops.speculative.dspark.dspark_accept"
SEAMS = Seams(device="cpu")


@SEAMS.replace(
    "rehearsed-chain",
    f"{_RULE}.chain_speculative_sampling_triton",
    why="upstream's chain rejection sampling is a Triton kernel",
)
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
    and the accepted drafts. accept_token_num: [R]. candidates: [R, n]. uniform_samples: [R, >= n -
    1]. target_probs: [R, n, V]; draft_probs: [R, >= n - 1, V]. Thresholds are not read.
    """
    n = candidates.shape[1]
    drafts = candidates[:, 1:].to(torch.int64)
    coins, last = uniform_samples[:, : n - 1], uniform_samples_for_final_sampling
    outcome = accept_sampled(drafts, draft_probs[:, : n - 1], target_probs, coins, last)
    accept_token_num.copy_(outcome.accepted)
    kept = torch.arange(n)[None, :] <= outcome.accepted[:, None]  # [R, n], the anchor included
    nodes = retrive_index.to(torch.int64)  # [R, n]
    accept_index[:, :n] = torch.where(kept, nodes, accept_index[:, :n]).to(accept_index.dtype)
    predicts[nodes[kept]] = outcome.tokens(drafts)[kept].to(predicts.dtype)


SEAMS.replace(
    "rehearsed-probabilities",
    f"{_RULE}.build_speculative_verify_target_probs",
    why="as the seam cpu-target-probs",
)(build_target_probs)
