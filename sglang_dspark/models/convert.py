"""Convert SmolLM2-135M-Instruct from GGUF to Hugging Face files, without torch.

The file's tensors are dequantised to float32 and renamed. llama.cpp interleaves the rotary halves
of each head in the query and key projections, which is undone here. The tokenizer is built from the
file's tokens and merges with SmolLM2's own pre-tokenizer (`smollm` in llama.cpp): every digit is a
separate token, then byte-level BPE.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sglang_dspark.common.atomic_write import permit_as_new
from sglang_dspark.errors import DSparkError
from sglang_dspark.models.source import Progress

_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}


def convert(gguf_path: Path, out_dir: Path, progress: Progress) -> None:
    """Write weights, config, tokenizer and chat template of the GGUF file into `out_dir`.

    Raises DSparkError if the file is not the Llama model that this converter supports.
    """
    reader = gguf.GGUFReader(str(gguf_path))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if (
        fields.get("general.architecture") != "llama"
        or fields.get("tokenizer.ggml.pre") != "smollm"
    ):
        raise DSparkError(f"{gguf_path} is not SmolLM2 (a Llama model with the smollm tokenizer)")
    weights = out_dir / "model.safetensors"
    save_file(_weights(reader, fields, progress), weights, {"format": "pt"})
    permit_as_new(weights)
    progress("writing tokenizer", 0, 0)
    _write_json(out_dir / "config.json", _config(fields))
    _write_json(out_dir / "generation_config.json", _generation_config(fields))
    _tokenizer(fields).save(str(out_dir / "tokenizer.json"), pretty=False)
    _write_json(out_dir / "tokenizer_config.json", _tokenizer_config(fields))
    (out_dir / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])


def _weights(
    reader: Any, fields: Mapping[str, Any], progress: Progress
) -> dict[str, NDArray[np.float32]]:
    weights: dict[str, NDArray[np.float32]] = {}
    for done, tensor in enumerate(reader.tensors, start=1):
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        layer = _LAYER.fullmatch(tensor.name)
        if layer is None:
            name = _OTHER_NAMES[tensor.name]
        else:
            name = f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.weight"
            if layer[2] == "attn_q":
                weight = _split_halves(weight, fields["llama.attention.head_count"])
            elif layer[2] == "attn_k":
                weight = _split_halves(weight, fields["llama.attention.head_count_kv"])
        weights[name] = np.ascontiguousarray(weight)
        progress("dequantising", done, len(reader.tensors))
    return dict(sorted(weights.items()))


def _split_halves(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder rows [heads * D, d]: adjacent rotary pairs to first halves, then second halves."""
    rows, width = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, width)  # [heads, D/2, 2, d]
    return pairs.swapaxes(1, 2).reshape(rows, width)


def _config(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "dtype": "float32",
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": fields["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "initializer_range": 0.02,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        # the file holds the float32 nearest to 1e-5; write the intended decimal
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {
            "rope_theta": fields["llama.rope.freq_base"],
            "rope_type": "default",
        },
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }


def _generation_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _tokenizer(fields: Mapping[str, Any]) -> Tokenizer:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        token
        for token, kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
        if kind == gguf.TokenType.CONTROL
    ]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return tokenizer


def _tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "model_max_length": fields["llama.context_length"],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        # transformers 5 rebuilds a GPT2Tokenizer's pre-tokenizer and would drop the digits rule
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
    }


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
