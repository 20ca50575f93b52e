"""Accept operators of speculative sampling, which upstream has for GPUs only.

Upstream (0.5.23): speculative/eagle_utils.py, dflash_utils.py and spec_utils.py, and
kernels/ops/speculative/dspark/dspark_accept.py bind Triton or CUDA operators, or None on CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving.cpu import accept_ops
from sglang_dspark.verify import sampling


def verify_uses_greedy(
    *, is_all_greedy: bool, is_cpu: bool, is_hip: bool, is_xpu: bool, use_rejection_sampling: bool
) -> bool:
    """REPLACE hook of `_verify_uses_greedy`: only when every request is greedy."""
    return is_all_greedy


def row_argmax(x: Tensor) -> Tensor:
    """REPLACE hook of `spec_utils.row_argmax`: argmax over the last axis."""
    return x.argmax(dim=-1)


def top_k_renorm_prob(probs: Tensor, top_ks: Tensor) -> Tensor:
    """Keep the k most probable tokens of each row [N, V] and renormalise."""
    rows = len(probs)
    return sampling.truncate(probs, top_ks.reshape(-1), torch.ones(rows), torch.zeros(rows))


def top_p_renorm_prob(probs: Tensor, top_ps: Tensor) -> Tensor:
    """Keep each row's smallest set of tokens with mass top_p [N, V] and renormalise."""
    rows, vocab = probs.shape
    every = torch.full((rows,), vocab)
    return sampling.truncate(probs, every, top_ps.reshape(-1), torch.zeros(rows))


_CHAIN = "chain_speculative_sampling_triton"
_TREE = "tree_speculative_sampling_target_only"
_TRITON_SIGNATURE = (
    "(predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token, "
    "retrive_next_sibling, uniform_samples, uniform_samples_for_final_sampling, target_probs, "
    "draft_probs, threshold_single, threshold_acc, deterministic, *, block_verification=False)"
)
_NONE_ON_CPU = "the operator is None on CPU, so sampled verification stops with a TypeError"


def _set(target: str, hook: object) -> Seam:
    module, _, attribute = target.rpartition(".")
    short = attribute.replace("_", "-")
    return Seam(
        name=f"cpu-{module.rpartition('.')[2].replace('_', '-')}-{short}",
        target=target,
        kind="set",
        hook=hook,
        expected_repr="None",
        why=_NONE_ON_CPU,
        device="cpu",
    )


SEAMS = (
    Seam(
        name="cpu-dspark-accept",
        target=f"sglang.kernels.ops.speculative.dspark.dspark_accept.{_CHAIN}",
        kind="replace",
        hook=accept_ops.chain_speculative_sampling,
        signature=_TRITON_SIGNATURE,
        why="DSPARK's sampled accept is a Triton kernel",
        device="cpu",
    ),
    Seam(
        name="cpu-eagle-verify-greedy",
        target="sglang.srt.speculative.eagle_utils._verify_uses_greedy",
        kind="replace",
        hook=verify_uses_greedy,
        signature="(*, is_all_greedy, is_cpu, is_hip, is_xpu, use_rejection_sampling)",
        why="EAGLE on CPU ignores the temperature and decodes greedily",
        device="cpu",
    ),
    Seam(
        name="cpu-row-argmax",
        target="sglang.srt.speculative.spec_utils.row_argmax",
        kind="replace",
        hook=row_argmax,
        signature="(x)",
        why="the draft's argmax is a Triton kernel",
        device="cpu",
    ),
    _set(f"sglang.srt.speculative.eagle_utils.{_TREE}", accept_ops.chain_sampling_target_only),
    _set(f"sglang.srt.speculative.dflash_utils.{_TREE}", accept_ops.chain_sampling_target_only),
    _set("sglang.srt.speculative.eagle_utils.top_k_renorm_prob", top_k_renorm_prob),
    _set("sglang.srt.speculative.eagle_utils.top_p_renorm_prob", top_p_renorm_prob),
)
