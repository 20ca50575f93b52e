"""A tiny target whose next token depends on the last one alone, and drafters that know it.

The target is a three-layer Llama whose layers add nothing (their last projections are zero), so
its logits are a table [V, V] known exactly. A drafter's Markov head can hold that same table: it is
then right at each greedy step. With noise on it, it is often right, and verification must
correct it. Tokens are bytes, so any text works.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sglang_dspark.drafter.checkpoint import save_drafter
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.drafter.model import DSparkDrafter
from sglang_dspark.drafter.target_fit import Target
from sglang_dspark.drafter.weight_files import read_tensors
from sglang_dspark.serving.checkpoint import convert_drafter
from tests.drafter.published import Published

GAMMA = 5
HIDDEN = 64
LAYERS = 3
ATTENDS = 0.005  # at which three of five tokens follow from the last one alone
LLAMA3_ROTATION = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ARCHITECTURES: dict[str, tuple[Any, Any]] = {  # with a compiled fast path: config, model
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
HOOKED: dict[str, tuple[Any, Any]] = {  # without, whose features are read by hooks on the layers
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "granite": (GraniteConfig, GraniteForCausalLM),
}
RECURRENT: dict[str, tuple[Any, Any]] = {  # with layers that keep a state
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
}
STATES = {  # of their configs: one layer of attention between two with a state
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "full_attention_interval": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
}
SPECIALS = ("<s>", "</s>", "<pad>", "<mask>")


@dataclass(frozen=True)
class TinyPair:
    """Directories of a target and its drafter, and the target's logits [V (last), V (next)]."""

    target: Path
    drafter: Path
    logits: torch.Tensor


def build(folder: Path, *, noise: float = 0.0, seed: int = 0, attends: float = 0.0) -> TinyPair:
    """Write target and drafter below `folder`.

    noise: standard deviation of what is added to the drafter's table, in units of the logits' own.
    attends: what the target's layers have to say, as a part of a random model's; above 0 a token
    depends on all before it, the drafter is wrong at times, and `logits` is of the last alone.
    """
    target, drafter = folder / "target", folder / "drafter"
    vocabulary = _save_tokenizer(target)
    model = build_target(vocabulary, seed, attends)
    model.save_pretrained(target, safe_serialization=True)
    logits = _next_token_logits(model)
    write_drafter(drafter, model, noise, seed)
    return TinyPair(target, drafter, logits)


def build_moe(folder: Path, pair: TinyPair) -> Path:
    """Write a drafter with experts, streams, a window and an RNN head; its directory.

    The head knows the target's table as the pair's drafter does, up to its recurrence. Its layers
    are random and change drafts.
    """
    config = replace(
        DrafterConfig.from_dir(pair.drafter),
        num_layers=2,
        num_experts=4,
        experts_per_token=2,
        moe_intermediate_size=HIDDEN,
        num_shared_experts=1,
        routed_scaling=2.0,
        residual_streams=4,
        window=16,
        markov_head_type="rnn",
    )
    torch.manual_seed(3)
    drafter = DSparkDrafter(config)
    weights, heads = drafter.state_dict(), read_tensors(pair.drafter)
    with torch.no_grad():
        for name in heads.keys() & weights.keys():  # outside the backbone, names are the file's
            weights[name].copy_(heads[name])
        weights["backbone.norm.weight"].fill_(0.1)
        know_table(weights)
    save_drafter(drafter, folder)
    return folder


def know_table(weights: Mapping[str, torch.Tensor]) -> None:
    """Make an RNN head's bias nearly W2 W1[x], moved by its state and by h."""
    joint, w2 = weights["markov_head.joint_proj.weight"], weights["markov_head.markov_w2.weight"]
    rank, share = w2.shape[1], 0.3  # tanh of that share of W1[x] is nearly linear
    joint[:, :rank].normal_(std=0.1)
    joint[2 * rank :, rank : 2 * rank].copy_(share * torch.eye(rank))
    w2.div_(share)


def build_published(folder: Path, pair: TinyPair) -> Path:
    """Write a published drafter for the pair's target, in the layout of `speculators`.

    It drafts over 180 of 260 tokens and not in the anchor's row. Two of its three layers have a
    causal window of 16, and all have Llama 3's rotation. Its gated Markov head knows the target's
    table as that of the pair's drafter does, where its gates are open.
    """
    target, heads = read_tensors(pair.target), read_tensors(pair.drafter)
    embedding = target["embed_tokens.weight"]
    published = Published(
        hidden=HIDDEN,
        vocab=len(embedding),
        columns=180,
        layers=3,
        head_dim=16,
        inner=2 * HIDDEN,
        block=GAMMA + 1,
        rank=HIDDEN,
        markov="gated",
        window=16,
        sliding=(0, 2),
        from_anchor=False,
        rotary=LLAMA3_ROTATION | {"factor": 8.0, "original_max_position_embeddings": 64},
        features=(1, 2),
        mask_id=SPECIALS.index("<mask>"),
        embed=embedding,
        target_head=target["lm_head.weight"],
    )
    w1, w2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
    published.tensors[w1] = heads[w1]
    published.tensors[w2] = heads[w2][published.token_ids()].contiguous()
    published.tensors["markov_head.gate_proj.bias"] += 2
    published.tensors["norm.weight"] = torch.full((HIDDEN,), 0.3)  # windows change drafts
    return published.write(folder)


def build_public_shape(folder: Path) -> TinyPair:
    """Write a pair with the vocabulary, window and block of small public drafters, converted.

    Target: 128,256 tokens, as Llama 3.2. Drafter: 32,000 of them, blocks of 8, Llama 3's rotation
    and a window of 2,048 tokens in one of two layers. `logits` is empty: the table would take
    66 GB.
    """
    target, published = folder / "target", folder / "published"
    _save_tokenizer(target)
    model = build_target(128_256)
    made = Published(
        hidden=HIDDEN,
        vocab=128_256,
        columns=32_000,
        head_dim=16,
        inner=2 * HIDDEN,
        block=8,
        rank=HIDDEN,
        window=2048,
        sliding=(0,),
        rotary=LLAMA3_ROTATION | {"factor": 32.0, "original_max_position_embeddings": 8192},
        features=(1, 2),
        mask_id=SPECIALS.index("<mask>"),
        embed=model.model.embed_tokens.weight.detach(),
        target_head=model.lm_head.weight.detach(),
    )
    with torch.no_grad():
        model.lm_head.weight[made.token_ids()] *= 2  # most likely tokens can be drafted
    head = model.lm_head.weight.detach()[made.token_ids()]
    made.tensors["lm_head.weight"] = head
    made.tensors["markov_head.markov_w1.weight"] = normed_embedding(model)
    made.tensors["markov_head.markov_w2.weight"] = head.clone()
    made.tensors["norm.weight"] = torch.full((HIDDEN,), 0.6)  # the window changes drafts
    made.tensors["layers.0.self_attn.q_norm.weight"] *= 8
    model.save_pretrained(target, safe_serialization=True)
    facts = Target(str(target), HIDDEN, 128_256, LAYERS, "LlamaForCausalLM")
    convert_drafter(made.write(published), folder / "drafter", facts)
    return TinyPair(target, folder / "drafter", torch.empty(0))


def build_listening(
    folder: Path, pair: TinyPair, head: str = "vanilla", *, from_anchor: bool = True
) -> Path:
    """Write a dense drafter for the pair's target whose layers have a say; its directory.

    What it drafts, and how sure it is, depends on the context that it was given. head: of the
    Markov heads, each knows the target's table nearly.
    """
    torch.manual_seed(5)
    config = replace(
        DrafterConfig.from_dir(pair.drafter),
        num_layers=2,
        markov_head_type=head,
        sample_from_anchor=from_anchor,
    )
    drafter = DSparkDrafter(config)
    weights, heads = drafter.state_dict(), read_tensors(pair.drafter)
    with torch.no_grad():
        for name in heads.keys() & weights.keys():  # outside the backbone, names are the file's
            weights[name].copy_(heads[name])
        weights["backbone.norm.weight"].fill_(0.2)
        weights["confidence_head.proj.weight"].normal_()
        if head == "gated":
            weights["markov_head.gate_proj.bias"].fill_(2.0)
        elif head == "rnn":
            know_table(weights)
    save_drafter(drafter, folder)
    return folder


def build_attending(folder: Path) -> TinyPair:
    """Write a pair below `folder` whose tokens depend on all before them; what the last one alone
    says is right two times of three, and the drafter knows that much and how sure it may be."""
    pair = build(folder, attends=0.005)
    return replace(pair, drafter=build_listening(folder / "listening", pair))


def _save_tokenizer(folder: Path) -> int:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    fast.save_pretrained(folder)
    return len(vocabulary)


def build_architecture(folder: Path, name: str) -> TinyPair:
    """Write a pair of an architecture in bfloat16, for every fast path that a CPU server has.

    SGLang pads an LM head to a multiple of 64 rows, and passes around its runner require one that
    it does not pad: 320 ids for the tokenizer's 260 tokens.
    """
    used = _save_tokenizer(folder / "target")
    attends = ATTENDS if name in RECURRENT else 0.02  # states alone change five of six tokens
    model = build_target(320, attends=attends, architecture=name)
    with torch.no_grad():
        model.lm_head.weight[used:] = 0.0
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    model.save_pretrained(folder / "target", safe_serialization=True)
    write_drafter(folder / "drafter", model, noise=0.2)
    return TinyPair(folder / "target", folder / "drafter", _next_token_logits(model))


def build_target(
    vocabulary: int,
    seed: int = 0,
    attends: float = 0.0,
    hidden: int = HIDDEN,
    architecture: str = "llama",
) -> Any:
    """Return a target whose logits follow from the last token, with random weights."""
    torch.manual_seed(seed)
    config_class, model_class = {**ARCHITECTURES, **HOOKED, **RECURRENT}[architecture]
    config = config_class(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=architecture == "gemma3",  # SGLang's skips another head
        rms_norm_eps=1e-6,
        initializer_range=0.25,
        dtype="float32",
        **(STATES if architecture in RECURRENT else {}),
    )
    model = model_class(config).float().eval()
    with torch.no_grad():
        for layer in model.model.layers:
            mixer = (
                layer.self_attn.o_proj
                if hasattr(layer, "self_attn")
                else layer.linear_attn.out_proj
            )
            mixer.weight.mul_(attends)
            layer.mlp.down_proj.weight.mul_(attends)
            if architecture == "gemma3":  # norms behind them, of 1 + weight, undo that
                layer.post_attention_layernorm.weight.fill_(attends - 1)
                layer.post_feedforward_layernorm.weight.fill_(attends - 1)
        model.lm_head.weight[: len(SPECIALS)] = 0.0  # specials are rare, so texts stay long
    return model


def normed_embedding(model: LlamaForCausalLM) -> torch.Tensor:
    """Return what the LM head reads behind each token, [V, d]."""
    with torch.no_grad():
        return model.model.norm(model.model.embed_tokens.weight)  # [V, d]


def _next_token_logits(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return normed_embedding(model) @ model.lm_head.weight.T  # [V, V]


def write_drafter(
    folder: Path, model: LlamaForCausalLM, noise: float = 0.0, seed: int = 0, gamma: int = GAMMA
) -> None:
    """Write a drafter whose Markov head holds the target's table."""
    hidden = model.config.hidden_size
    config = DrafterConfig(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=model.config.vocab_size,
        gamma=gamma,
        target_layer_ids=(0, 1),
        num_target_layers=LAYERS,
        mask_token_id=SPECIALS.index("<mask>"),
        markov_rank=hidden,
        max_position_embeddings=4096,
    )
    torch.manual_seed(seed + 1)
    drafter = DSparkDrafter(config)
    weights = drafter.state_dict()
    table = model.lm_head.weight.detach()
    with torch.no_grad():
        weights["backbone.norm.weight"].zero_()  # base logits are zero: the Markov head decides
        weights["markov_head.markov_w1.weight"].copy_(normed_embedding(model))
        weights["markov_head.markov_w2.weight"].copy_(
            table + noise * table.std() * torch.randn_like(table)
        )
        weights["confidence_head.proj.weight"].zero_()
        weights["confidence_head.proj.bias"].fill_(1.0)
    save_drafter(drafter, folder)


def main() -> None:
    """`python -m tests.integration.tiny_models FOLDER`: a pair that attends and listens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--attends", type=float, default=ATTENDS)
    parser.add_argument("--noise", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    pair = build(options.folder, noise=options.noise, seed=options.seed, attends=options.attends)
    drafter = build_listening(options.folder / "listening", pair)
    print(f"--target {pair.target} --drafter {drafter}")


if __name__ == "__main__":
    main()
