"""Split a dense MLP into experts, so that a layer with experts starts as the same function.

This is "sparse upcycling" (Komatsuzaki et al., 2023), but the neurons are divided, not copied
whole. The shared experts get the MLP's largest neurons. Routed experts form groups of k = experts
per token; each group divides the rest in its own random order, and its experts share one router
row. So a token starts with the k experts of one group: all of the MLP's neurons, with equal weights
that sum to k. Training then makes the experts differ.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dspark.drafter.moe import MoE

_SEED = 0x5EED


@torch.no_grad()
def split_mlp(moe: MoE, gate: Tensor, up: Tensor, down: Tensor) -> bool:
    """Fill the experts with the neurons of an MLP: gate, up [I, d], down [d, I].

    Returns False, with no change, if they cannot add up to it: a token's experts do not have I
    neurons in all, groups of k do not divide the experts, or weights are not normalised to k.
    """
    c = moe.gate.c
    k, width, shared = c.experts_per_token, c.moe_intermediate_size, c.num_shared_experts
    fits = (shared + k) * width == len(gate) and c.num_experts % k == 0
    if not fits or not c.normalise_weights or c.routed_scaling != k:
        return False
    size = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)  # [I]
    ranked = size.argsort(descending=True, stable=True)
    common, rest = ranked[: shared * width], ranked[shared * width :]
    if moe.shared_experts is not None:
        moe.shared_experts.gate_proj.weight.copy_(gate[common])
        moe.shared_experts.up_proj.weight.copy_(up[common])
        moe.shared_experts.down_proj.weight.copy_(down[:, common])
    generator = torch.Generator().manual_seed(_SEED)
    for first in range(0, c.num_experts, k):
        dealt = rest[torch.randperm(len(rest), generator=generator)].view(k, width)
        for expert, neurons in enumerate(dealt, first):
            moe.experts.gate_proj[expert] = gate[neurons]
            moe.experts.up_proj[expert] = up[neurons]
            moe.experts.down_proj[expert] = down[:, neurons]
            moe.gate.weight[expert] = moe.gate.weight[first]
    return True
