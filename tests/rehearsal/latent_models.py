"""A made-up small DeepSeek-V4 that carries its drafter, in the layout of a published checkpoint.

Two of four experts a token, four residual streams, latent attention to a window of 128. The
drafter's Markov head knows the target's next token where that follows from the last one alone.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.integration.tiny_models import GAMMA, SPECIALS, _save_tokenizer

HIDDEN, HEADS, HEAD, LORA, GROUPS, EXPERTS, INNER, STREAMS = 64, 4, 512, 32, 2, 4, 64, 4
LAYERS, FEATURES = (
    4,
    (1, 3),
)  # SGLang requires four layers; a stage for each feature
SAYS = 0.3  # of a layer's outputs: some drafts are right, and tokens depend on all before them

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "float32",
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 1,
    "head_dim": HEAD,
    "qk_rope_head_dim": 64,
    "v_head_dim": HEAD,
    "q_lora_rank": LORA,
    "o_lora_rank": LORA,
    "o_groups": GROUPS,
    "sliding_window": 128,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "compress_ratios": [0] * LAYERS,
    "compress_rope_theta": 40000,
    "rope_theta": 10000,
    "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 1024},
    "max_position_embeddings": 4096,
    "moe_intermediate_size": INNER,
    "n_routed_experts": EXPERTS,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "num_hash_layers": 0,
    "n_hash_layers": 0,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "hc_mult": STREAMS,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "num_nextn_predict_layers": len(FEATURES),
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dspark_block_size": GAMMA,
    "dspark_markov_rank": HIDDEN,
    "dspark_noise_token_id": SPECIALS.index("<mask>"),
    "dspark_target_layer_ids": list(FEATURES),
}


def build(folder: Path) -> Path:
    """Write the checkpoint to `folder` and return it."""
    vocabulary = _save_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": vocabulary}))
    torch.manual_seed(5)
    weights = {
        "embed.weight": torch.randn(vocabulary, HIDDEN),
        "head.weight": torch.randn(vocabulary, HIDDEN) * 0.25,
        "norm.weight": torch.ones(HIDDEN),
        **_head_streams(""),
    }
    weights["head.weight"][: len(SPECIALS)] = 0.0  # specials are rare, so texts stay long
    for index in range(LAYERS):
        weights |= _layer(f"layers.{index}.")
    for index in range(len(FEATURES)):
        weights |= _layer(f"mtp.{index}.")
    weights |= _drafter_heads(weights)
    save_file({name: each.contiguous() for name, each in weights.items()}, folder / _FILE)
    return folder


_FILE = "model.safetensors"


def _drafter_heads(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    embed, last = weights["embed.weight"], f"mtp.{len(FEATURES) - 1}."
    scale = torch.rsqrt(embed.square().mean(-1, keepdim=True))
    confidence = torch.cat([torch.zeros(1, HIDDEN), torch.randn(1, HIDDEN) * 0.15], dim=1)
    return {
        "mtp.0.main_proj.weight": torch.randn(HIDDEN, len(FEATURES) * HIDDEN) * 0.1,
        "mtp.0.main_norm.weight": torch.ones(HIDDEN),
        f"{last}norm.weight": torch.full((HIDDEN,), 0.1),
        **_head_streams(last),
        f"{last}markov_head.markov_w1.weight": embed * scale,
        f"{last}markov_head.markov_w2.weight": weights["head.weight"].clone(),
        f"{last}confidence_head.proj.weight": confidence,
    }


def _head_streams(prefix: str) -> dict[str, Tensor]:
    return {
        f"{prefix}hc_head_fn": torch.randn(STREAMS, STREAMS * HIDDEN) * 0.01,
        f"{prefix}hc_head_base": torch.zeros(STREAMS),
        f"{prefix}hc_head_scale": torch.ones(1),
    }


def _layer(prefix: str) -> dict[str, Tensor]:
    def random(out: int, width: int, scale: float = 1.0) -> Tensor:
        return torch.randn(out, width) * scale * width**-0.5

    weights = {
        "attn_norm.weight": torch.ones(HIDDEN),
        "ffn_norm.weight": torch.ones(HIDDEN),
        "attn.attn_sink": torch.zeros(HEADS),
        "attn.wq_a.weight": random(LORA, HIDDEN),
        "attn.q_norm.weight": torch.ones(LORA),
        "attn.wq_b.weight": random(HEADS * HEAD, LORA),
        "attn.wkv.weight": random(HEAD, HIDDEN),
        "attn.kv_norm.weight": torch.ones(HEAD),
        "attn.wo_a.weight": random(GROUPS * LORA, HEADS * HEAD // GROUPS),
        "attn.wo_b.weight": random(HIDDEN, GROUPS * LORA, SAYS),
        "ffn.gate.weight": random(EXPERTS, HIDDEN),
        "ffn.gate.bias": torch.zeros(EXPERTS),
    }
    for expert in (*(f"experts.{index}" for index in range(EXPERTS)), "shared_experts"):
        weights[f"ffn.{expert}.w1.weight"] = random(INNER, HIDDEN)
        weights[f"ffn.{expert}.w3.weight"] = random(INNER, HIDDEN)
        weights[f"ffn.{expert}.w2.weight"] = random(HIDDEN, INNER, SAYS)
    size = STREAMS * (STREAMS + 2)
    for block in ("attn", "ffn"):
        weights[f"hc_{block}_fn"] = random(size, STREAMS * HIDDEN)
        weights[f"hc_{block}_base"] = torch.zeros(size)
        weights[f"hc_{block}_scale"] = torch.full((3,), 0.1)
    return {prefix + name: weight for name, weight in weights.items()}
