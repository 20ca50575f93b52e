"""Verify sampled drafts of DFLASH on a CPU, by a torch operator and plain decoding's distribution.

Upstream: sglang/srt/speculative/dflash_utils.py imports the operator by value, so its name there is
the target; on a CPU it is None. `build_speculative_verify_target_probs`, also there, is not the
distribution of plain decoding (backends/cpu/accept.py); sampling masks of DSPARK are cut from it,
too.
"""

from __future__ import annotations

from sglang_dspark.backends.cpu import accept, verify_ops
from sglang_dspark.patches.seam import Seam


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


_DFLASH = "sglang.srt.speculative.dflash_utils"

SEAMS = (
    target_probs("cpu-target-probs", _DFLASH),
    Seam(
        name="cpu-tree-sampling-dflash",
        target=f"{_DFLASH}.tree_speculative_sampling_target_only",
        kind="set",
        hook=verify_ops.tree_speculative_sampling_target_only,
        expected_repr="None",
        why="upstream has no operator for a CPU here, so sampling with DFLASH fails",
        device="cpu",
    ),
    Seam(
        name="cpu-dflash-sampling",
        target=f"{_DFLASH}._DFLASH_SAMPLING_VERIFY_AVAILABLE",
        kind="set",
        hook=True,
        expected_repr="False",
        why="without it DFLASH serves sampled requests greedily",
        device="cpu",
    ),
)
