"""Verify sampled drafts on a CPU: torch operators where upstream has Triton, CUDA or none.

Upstream: sglang/kernels/ops/speculative/dspark/dspark_accept.py and
sglang/srt/speculative/{eagle_utils,dflash_utils}.py import the operators by value, so the
consumers' names are the targets; on a CPU some of them are None. `eagle_utils._verify_uses_greedy`
makes EAGLE ignore the temperature on a CPU. `build_speculative_verify_target_probs`, of
dflash_utils.py too, is not the distribution of plain decoding (backends/cpu/accept.py).
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.backends.cpu import accept, verify_ops
from sglang_dspark.patches.seam import Seam

_CHAIN_SIGNATURE = (
    "(predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, "
    "retrive_next_sibling, uniform_samples, uniform_samples_for_final_sampling, target_probs, "
    "draft_probs, threshold_single, threshold_acc, deterministic, *, block_verification=False)"
)


def verify_uses_greedy(
    *,
    is_all_greedy: bool,
    is_cpu: bool,
    is_hip: bool,
    is_xpu: bool,
    use_rejection_sampling: bool,
) -> bool:
    """REPLACE hook: verify greedily only when every request asks for it."""
    return is_all_greedy


def chain_sampling(name: str, target: str) -> Seam:
    """Return a seam that replaces chain rejection sampling at `target`."""
    return Seam(
        name=name,
        target=target,
        kind="replace",
        hook=verify_ops.chain_speculative_sampling,
        signature=_CHAIN_SIGNATURE,
        why="upstream's chain rejection sampling is a Triton kernel",
        device="cpu",
    )


def target_probs(name: str, target: str) -> Seam:
    """Return a seam that builds the target's distribution in the module `target` as we do."""
    return Seam(
        name=name,
        target=f"{target}.build_speculative_verify_target_probs",
        kind="replace",
        hook=accept.build_target_probs,
        signature="(*, next_token_logits, sampling_info, draft_token_num, bs, max_top_k=None, "
        "uniform_top_k_value=None, use_sparse_topk=True)",
        why="upstream's distribution ignores min-p, and with top-k and top-p both set it differs "
        "from plain decoding's",
        device="cpu",
    )


def _missing(name: str, target: str, hook: Any) -> Seam:
    return Seam(
        name=name,
        target=target,
        kind="set",
        hook=hook,
        expected_repr="None",
        why="upstream has no operator for a CPU here, so sampling with EAGLE or DFLASH fails",
        device="cpu",
    )


SEAMS = (
    chain_sampling(
        "cpu-chain-sampling-eagle",
        "sglang.srt.speculative.eagle_utils.chain_speculative_sampling_triton",
    ),
    target_probs("cpu-target-probs-dflash", "sglang.srt.speculative.dflash_utils"),
    _missing(
        "cpu-tree-sampling-eagle",
        "sglang.srt.speculative.eagle_utils.tree_speculative_sampling_target_only",
        verify_ops.tree_speculative_sampling_target_only,
    ),
    _missing(
        "cpu-top-k-eagle",
        "sglang.srt.speculative.eagle_utils.top_k_renorm_prob",
        verify_ops.top_k_renorm_prob,
    ),
    _missing(
        "cpu-top-p-eagle",
        "sglang.srt.speculative.eagle_utils.top_p_renorm_prob",
        verify_ops.top_p_renorm_prob,
    ),
    _missing(
        "cpu-tree-sampling-dflash",
        "sglang.srt.speculative.dflash_utils.tree_speculative_sampling_target_only",
        verify_ops.tree_speculative_sampling_target_only,
    ),
    Seam(
        name="cpu-dflash-sampling",
        target="sglang.srt.speculative.dflash_utils._DFLASH_SAMPLING_VERIFY_AVAILABLE",
        kind="set",
        hook=True,
        expected_repr="False",
        why="without it DFLASH serves sampled requests greedily",
        device="cpu",
    ),
    Seam(
        name="cpu-eagle-temperature",
        target="sglang.srt.speculative.eagle_utils._verify_uses_greedy",
        kind="replace",
        hook=verify_uses_greedy,
        signature="(*, is_all_greedy, is_cpu, is_hip, is_xpu, use_rejection_sampling)",
        why="upstream's EAGLE verify ignores the temperature on a CPU",
        device="cpu",
    ),
)
