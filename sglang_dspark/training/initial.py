"""Where training starts: draft layers from the target's last layers, the projection from its last
captured features, the transition bias from bigram statistics of its answers; or another drafter.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from sglang_dspark.drafter.backbone import Backbone, DraftLayer
from sglang_dspark.drafter.checkpoint import fill_drafter
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.drafter.heads import restrict_vocabulary, restricted_tokens
from sglang_dspark.drafter.model import DSparkDrafter
from sglang_dspark.drafter.moe import MoE
from sglang_dspark.drafter.weight_files import read_tensors
from sglang_dspark.errors import DSparkError
from sglang_dspark.training.config import DFlashShape, DrafterShape, DSparkShape, MoEShape
from sglang_dspark.training.store import StoreReader
from sglang_dspark.training.upcycling import split_mlp

_SWIGLU = ("gate", "up", "down")


def drafter_config(shape: DSparkShape | MoEShape | DFlashShape, target: Any) -> DrafterConfig:
    """The drafter's shape, with widths and heads of the target's (Transformers) config.

    Raises DSparkError where experts cannot be as wide together as the target's MLP, or layers are
    to begin as the target's that it does not have.
    """
    started = getattr(shape, "start_from", None) is not None
    if shape.init_from_target and not started and shape.layers > target.num_hidden_layers:
        raise DSparkError(
            f"drafter.layers {shape.layers} is more than the target's {target.num_hidden_layers}, "
            "which they begin as: lower it, or set drafter.init_from_target: false"
        )
    rope = getattr(target, "rope_parameters", None) or {}
    heads: dict[str, Any] = {"markov_rank": 1, "confidence_head": False}
    if not isinstance(shape, DFlashShape):
        heads = shape.model_dump(include={"markov_rank", "markov_head_type", "confidence_head"})
    return DrafterConfig(
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=shape.layers,
        num_heads=target.num_attention_heads,
        num_kv_heads=target.num_key_value_heads,
        head_dim=getattr(target, "head_dim", None)
        or target.hidden_size // target.num_attention_heads,
        vocab_size=target.vocab_size,
        gamma=shape.gamma,
        target_layer_ids=shape.target_layer_ids,
        num_target_layers=target.num_hidden_layers,
        mask_token_id=shape.mask_token_id,
        **heads,
        **(_moe_fields(shape, target) if isinstance(shape, MoEShape) else {}),
        rms_norm_eps=1e-6,
        rope_theta=float(rope.get("rope_theta", 10000.0)),
        max_position_embeddings=target.max_position_embeddings,
    )


def check_shape(shape: DrafterShape, target: Any) -> None:
    """DSparkError where no drafter of this shape can be made for the target (its config)."""
    if isinstance(shape, DSparkShape | MoEShape | DFlashShape):
        drafter_config(shape, target)


def _moe_fields(shape: MoEShape, target: Any) -> dict[str, Any]:
    """Fields of `DrafterConfig` that only a drafter with experts has.

    Weights sum to `experts_per_token`, not 1: experts that are parts of an MLP then add up to it.
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


def token_counts(reader: StoreReader, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Unigram counts [V] of the answers and their bigrams as ids [2, n]."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    pairs = []
    for i in range(len(reader)):
        tokens, _ = reader.tokens(i)
        for start, end in reader.answers(i):
            answer = tokens[max(start - 1, 0) : end]
            counts += torch.bincount(tokens[start:end], minlength=vocab_size)
            pairs.append(torch.stack([answer[:-1], answer[1:]]))
    return counts, torch.cat(pairs, 1)


def draft_vocabulary(counts: Tensor, size: int) -> tuple[Tensor, float]:
    """The `size` most frequent tokens, ascending ids [n], and the share of text they cover."""
    ids = counts.topk(min(size, len(counts))).indices
    coverage = float(counts[ids].sum() / counts.sum().clamp(min=1))
    return ids.sort().values, coverage


def vocabulary_of(path: Path, size: int) -> Tensor:
    """Draft vocabulary [size] of the drafter in a directory, which its Markov weights hold.

    Raises DSparkError when it has another size or none.
    """
    tensors = read_tensors(path)
    names = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
    if any(name not in tensors for name in names):
        raise DSparkError(f"{path} holds no DSpark drafter with a Markov head")
    ids = restricted_tokens(*(tensors[name].float() for name in names))
    found = tensors[names[0]].shape[0] if ids is None else len(ids)
    if ids is None or found != size:
        raise DSparkError(
            f"{path} drafts from {found} tokens, drafter.draft_vocab says {size}: set it to {found}"
        )
    return ids


def start_from(drafter: DSparkDrafter, path: Path) -> None:
    """Take the weights of a drafter of the same shape; DSparkError where the shapes differ."""
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
    """Factors [V, r], [V, r] of the positive pointwise mutual information of bigrams."""
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


def target_weights(target_dir: Path) -> dict[str, Tensor]:
    """All tensors of the target's checkpoint, by name."""
    weights: dict[str, Tensor] = {}
    for file in sorted(target_dir.glob("*.safetensors")):
        weights.update(load_file(str(file)))
    return weights


def initialise(drafter: DSparkDrafter, target_dir: Path, pairs: Tensor, ids: Tensor | None) -> None:
    """Fill `drafter` as described above; `ids` [n] is the reduced draft vocabulary, if any."""
    with torch.no_grad():
        start_backbone(drafter.backbone, drafter.config, target_weights(target_dir))
        _start_markov(drafter, pairs, ids)


@torch.no_grad()
def start_backbone(backbone: Backbone, c: DrafterConfig, weights: dict[str, Tensor]) -> None:
    """Layers and norms from the target's last ones; the last captured features pass through."""
    first = c.num_target_layers - c.num_layers
    for i, layer in enumerate(backbone.layers):
        _copy_layer(layer, weights, f"model.layers.{first + i}.")
        if isinstance(layer.mlp, MoE):
            mlp = [weights[f"model.layers.{first + i}.mlp.{k}_proj.weight"] for k in _SWIGLU]
            split_mlp(layer.mlp, *mlp)
    backbone.norm.weight.copy_(weights["model.norm.weight"])
    last = f"model.layers.{c.num_target_layers - 1}.input_layernorm.weight"
    backbone.hidden_norm.weight.copy_(weights[last])
    start_projection(backbone.fc.weight, c.hidden_size)


@torch.no_grad()
def start_projection(weight: Tensor, hidden_size: int) -> None:
    """Feature projection [d, m*d]: the last layer's features and a little noise."""
    weight.normal_(std=1e-3)
    weight[:, -hidden_size:] += torch.eye(hidden_size, device=weight.device)


def _start_markov(drafter: DSparkDrafter, pairs: Tensor, ids: Tensor | None) -> None:
    c, head = drafter.config, drafter.markov_head
    rank = c.markov_rank - (ids is not None)
    w1, w2 = bigram_factors(pairs, c.vocab_size, rank)
    head.markov_w1.weight.zero_()
    head.markov_w2.weight.zero_()
    head.markov_w1.weight[:, :rank] = w1 * 0.5
    head.markov_w2.weight[:, :rank] = w2 * 0.5
    if ids is not None:
        restrict_vocabulary(head, ids)
    if drafter.confidence_head is not None:
        drafter.confidence_head.proj.weight.zero_()
        drafter.confidence_head.proj.bias.zero_()


def _copy_layer(layer: DraftLayer, weights: dict[str, Tensor], prefix: str) -> None:
    """Copy one target layer; head norms, which Llama lacks, start at the scale its heads have."""
    own = dict(layer.named_parameters())
    for name, parameter in own.items():
        source = weights.get(prefix + name)
        if source is not None and source.shape == parameter.shape:
            parameter.copy_(source)
    gain = weights[prefix + "input_layernorm.weight"]
    for kind in ("q", "k"):
        if prefix + f"self_attn.{kind}_norm.weight" not in weights:
            projection = weights[prefix + f"self_attn.{kind}_proj.weight"] * gain
            scale = projection.pow(2).sum(-1).mean().sqrt()
            own[f"self_attn.{kind}_norm.weight"].fill_(float(scale))
