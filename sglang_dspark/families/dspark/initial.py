"""Start a DSpark drafter from the target or from another drafter.

The transition bias starts from bigram statistics of the target's answers, the backbone from the
target's last layers.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.drafter.checkpoint import fill_drafter
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.drafter.heads import (
    GatedMarkovHead,
    MarkovHead,
    RNNHead,
    restrict_vocabulary,
)
from sglang_dspark.drafter.model import DSparkDrafter
from sglang_dspark.errors import DSparkError
from sglang_dspark.families.dspark.shape import DSparkShape, MoEShape
from sglang_dspark.families.learning.initial import (
    backbone_fields,
    start_backbone,
    target_weights,
)

OPEN = 3.0  # bias of a gate: 0.95, which still has a gradient


def drafter_config(shape: DSparkShape | MoEShape, target: Any) -> DrafterConfig:
    """Return the drafter's config, with widths and heads of the target's (Transformers) config.

    Raises DSparkError if experts cannot together be as wide as the target's MLP, or if the target
    has fewer layers than the drafter is to copy.
    """
    return DrafterConfig(
        **backbone_fields(shape, shape.mask_token_id, target),
        **shape.model_dump(include={"markov_rank", "markov_head_type", "confidence_head"}),
        **(_moe_fields(shape, target) if isinstance(shape, MoEShape) else {}),
    )


def _moe_fields(shape: MoEShape, target: Any) -> dict[str, Any]:
    """Return the fields of `DrafterConfig` that only a drafter with experts has.

    Router weights sum to `experts_per_token`, not 1, so that experts that are parts of an MLP add
    up to it.
    """
    width, active = shape.expert_width, shape.experts_per_token + shape.shared_experts
    if width is None:
        width, rest = divmod(target.intermediate_size, active)
        if rest:
            raise DSparkError(
                f"the target's MLP of width {target.intermediate_size} is not {active} experts "
                "wide, which a token goes through: set drafter.expert_width"
            )
    return {
        "num_experts": shape.experts,
        "experts_per_token": shape.experts_per_token,
        "moe_intermediate_size": width,
        "num_shared_experts": shape.shared_experts,
        "router_scores": shape.router_scores,
        "routed_scaling": float(shape.experts_per_token),
        "window": shape.window,
        "residual_streams": shape.residual_streams,
    }


def start_from(drafter: DSparkDrafter, path: Path) -> None:
    """Copy the weights of a drafter of the same shape. Raises DSparkError if the shapes differ."""
    found = DrafterConfig.from_dir(path)
    if found != drafter.config:
        differing = [
            f"{f.name} {getattr(found, f.name)} (config: {getattr(drafter.config, f.name)})"
            for f in fields(found)
            if getattr(found, f.name) != getattr(drafter.config, f.name)
        ]
        raise DSparkError(f"drafter.start_from {path} has another shape: {', '.join(differing)}")
    fill_drafter(drafter, path)


def bigram_factors(pairs: Tensor, vocab_size: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return factors [V, r], [V, r] of the positive pointwise mutual information of bigrams."""
    flat, counts = torch.unique(pairs[0] * vocab_size + pairs[1], return_counts=True)
    a, b, n = flat // vocab_size, flat % vocab_size, counts.float()
    left = torch.bincount(pairs[0], minlength=vocab_size).float()
    right = torch.bincount(pairs[1], minlength=vocab_size).float()
    value = (n * float(pairs.shape[1]) / (left[a] * right[b])).log() * (n / (n + 2))
    keep = value > 0
    size = (vocab_size, vocab_size)
    at = torch.stack([a[keep], b[keep]])
    matrix = torch.sparse_coo_tensor(at, value[keep], size, check_invariants=True).coalesce()
    u, s, v = torch.svd_lowrank(matrix, q=rank, niter=2)
    return u * s.sqrt(), v * s.sqrt()


def initialise(drafter: DSparkDrafter, target_dir: Path, pairs: Tensor, ids: Tensor | None) -> None:
    """Fill `drafter` as the module describes; `ids` [n] is the reduced draft vocabulary, if any."""
    with torch.no_grad():
        start_backbone(drafter.backbone, drafter.config, target_weights(target_dir))
        _start_markov(drafter, pairs, ids)


def _start_markov(drafter: DSparkDrafter, pairs: Tensor, ids: Tensor | None) -> None:
    c, head = drafter.config, drafter.markov_head
    rank = c.markov_rank - (ids is not None)
    w1, w2 = bigram_factors(pairs, c.vocab_size, rank)
    head.markov_w1.weight.zero_()
    head.markov_w2.weight.zero_()
    head.markov_w1.weight[:, :rank] = w1 * 0.5
    head.markov_w2.weight[:, :rank] = w2 * 0.5
    _pass_through(head)
    if ids is not None:
        restrict_vocabulary(head, ids)
    if drafter.confidence_head is not None:
        drafter.confidence_head.proj.weight.zero_()
        drafter.confidence_head.proj.bias.zero_()


def _pass_through(head: MarkovHead) -> None:
    """Make a gated or recurrent head start as the plain one.

    With random weights the bigrams are lost, and after 2,000 steps the first draft has not
    recovered (dev/LOG.md).
    """
    rank = head.markov_w1.weight.shape[1]
    if isinstance(head, GatedMarkovHead):
        head.gate_proj.weight.zero_()
        head.gate_proj.bias.fill_(OPEN)
    elif isinstance(head, RNNHead):
        output = slice(2 * rank, 3 * rank)
        head.joint_proj.weight[output] = 0.0
        head.joint_proj.weight[output, rank : 2 * rank] = torch.eye(rank)  # of the token's row
        head.joint_proj.bias[output] = 0.0
