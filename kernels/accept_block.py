"""Verify sampled windows as a whole, without a tensor of probabilities.

Sun et al. 2024, "Block Verification Accelerates Speculative Decoding".

The rule is `sglang_dspark.verify.block.accept_block`, of requests that are neither greedy nor
seeded and whose drafts were drawn from logits; every other request has the rule of
`accept_sampled.py`, whose launches and memory these are. The last launch sums S_i of each draft by
chunks; its last program to arrive walks h_1 .. h_l and draws from max(p_tau p_t - p_d, 0), or from
p_t. Where the whole window is kept only p_t is summed.

Outcomes are the reference's except where a uniform lies within rounding of a boundary: weights are
float32 and p_i, S_i and all sums float64 here, where torch rounds probabilities to float32.
"""

from __future__ import annotations

from torch import Tensor

from sglang_dspark.kernels.accept_sampled import GPU, Outcome, Tiling, launch
from sglang_dspark.kernels.accept_windows import Windows


def accept_block_triton(
    given: Windows, arrivals: Tensor | None = None, how: Tiling = GPU
) -> Outcome:
    """Accept the drafts of a step by the block rule; arguments and errors of `accept_triton`."""
    drafted = given.draft_logits is not None and given.drafts.numel() > 0
    return launch(given, arrivals, how, by_block=drafted)
