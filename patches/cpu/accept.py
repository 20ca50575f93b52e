"""Verify sampled drafts of DFLASH on a CPU, by a torch operator and plain decoding's distribution.

Upstream: sglang/srt/speculative/dflash_utils.py imports the operator by value, so its name there is
the target; on a CPU it is None. `build_speculative_verify_target_probs` in the same file differs
from plain decoding's distribution (backends/cpu/accept.py); DSPARK's sampling masks are derived
from it, too.
"""

from __future__ import annotations

from sglang_dspark.backends.cpu import accept, verify_ops
from sglang_dspark.patches.seam import Seams

_DFLASH = "sglang.srt.speculative.dflash_utils"

SEAMS = Seams(device="cpu")
SEAMS.replace(
    "cpu-target-probs",
    f"{_DFLASH}.build_speculative_verify_target_probs",
    why="upstream's distribution ignores min-p, and with top-k and top-p both set it differs "
    "from plain decoding's",
)(accept.build_target_probs)
SEAMS.set(
    "cpu-tree-sampling-dflash",
    f"{_DFLASH}.tree_speculative_sampling_target_only",
    expected_repr="None",
    why="upstream has no operator for a CPU here, so sampling with DFLASH fails",
)(verify_ops.chain_speculative_sampling_target_only)
SEAMS.set(
    "cpu-dflash-sampling",
    f"{_DFLASH}._DFLASH_SAMPLING_VERIFY_AVAILABLE",
    expected_repr="False",
    why="without it DFLASH serves sampled requests greedily",
)(True)
