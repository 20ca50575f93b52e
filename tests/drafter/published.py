"""Drafters as the `speculators` library publishes them, and what they draft, computed plainly.

The reference follows the facts of the library's training pass (models/dflash/core.py and
attention.py, models/dspark/): one block, one dense mask, one token at a time. It shares no code
with the reader or the engine.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import linear, silu, softmax

THETA = 1e4


@dataclass
class Published:
    """One published drafter. target_head: [V, d] of its target, as is `embed`."""

    hidden: int = 32
    vocab: int = 61
    columns: int = 20
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    inner: int = 48
    block: int = 5
    rank: int = 8
    markov: str = "vanilla"
    window: int | None = None
    sliding: tuple[int, ...] = ()
    non_causal: bool = False
    from_anchor: bool = True
    with_markov: bool = True
    mask_id: int = 3
    features: tuple[int, ...] = (1, 3)  # aux_hidden_state_layer_ids: the target's layers 0 and 2
    seed: int = 0
    rotary: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default"})
    embed: Tensor | None = None
    target_head: Tensor | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        gen = torch.Generator().manual_seed(self.seed)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            return torch.randn(*shape, generator=gen) * scale

        d, r, q, kv = self.hidden, self.rank, self.heads * self.head_dim, self.kv_heads
        self.embed = normal(self.vocab, d) if self.embed is None else self.embed
        head = normal(self.vocab, d, scale=0.3) if self.target_head is None else self.target_head
        self.target_head = head
        ids = torch.randperm(self.vocab, generator=gen)[: self.columns].sort().values
        small, t = d**-0.5, self.tensors
        t["fc.weight"] = normal(d, len(self.features) * d, scale=small)
        for name in ("hidden_norm", "norm"):
            t[f"{name}.weight"] = 1 + normal(d, scale=0.1)
        for i in range(self.layers):
            at = f"layers.{i}."
            for name, rows in (("q", q), ("k", kv * self.head_dim), ("v", kv * self.head_dim)):
                t[f"{at}self_attn.{name}_proj.weight"] = normal(rows, d, scale=small)
            t[f"{at}self_attn.o_proj.weight"] = normal(d, q, scale=small)
            for name in ("q_norm", "k_norm"):
                t[f"{at}self_attn.{name}.weight"] = 1 + normal(self.head_dim, scale=0.1)
            for name in ("input_layernorm", "post_attention_layernorm"):
                t[f"{at}{name}.weight"] = 1 + normal(d, scale=0.1)
            for name in ("gate", "up"):
                t[f"{at}mlp.{name}_proj.weight"] = normal(self.inner, d, scale=small)
            t[f"{at}mlp.down_proj.weight"] = normal(d, self.inner, scale=small)
        t["markov_head.markov_w1.weight"] = normal(self.vocab, r)
        t["markov_head.markov_w2.weight"] = normal(self.columns, r)
        gates = {"gated": ("gate_proj", r, d + r), "rnn": ("joint_proj", 3 * r, 2 * r + d)}
        if self.markov in gates:
            name, rows, width = gates[self.markov]
            t[f"markov_head.{name}.weight"] = normal(rows, width, scale=small)
            t[f"markov_head.{name}.bias"] = normal(rows)
        t["confidence_head.proj.weight"] = normal(1, d + (r if self.with_markov else 0))
        t["confidence_head.proj.bias"] = normal(1)
        t["embed_tokens.weight"] = self.embed.clone()
        if self.columns == self.vocab:
            t["lm_head.weight"] = head.clone()
            return
        t["lm_head.weight"] = head[ids].clone()
        t["d2t"] = ids - torch.arange(self.columns)
        t["t2d"] = torch.zeros(self.vocab, dtype=torch.bool)
        t["t2d"][ids] = True

    def config(self) -> dict[str, Any]:
        kinds = ["sliding_attention" if i in self.sliding else "full_attention" for i in range(9)]
        layers = {
            "model_type": "qwen3",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "layer_types": kinds[: self.layers],
            "rope_parameters": {"rope_theta": THETA, **self.rotary},
            "use_sliding_window": bool(self.sliding),
            "sliding_window": self.window,
        }
        return {
            "architectures": ["DSparkSpeculator"],
            "aux_hidden_state_layer_ids": list(self.features),
            "block_size": self.block,
            "confidence_head_with_markov": self.with_markov,
            "draft_vocab_size": self.columns,
            "dtype": "float32",
            "enable_confidence_head": True,
            "markov_head_type": self.markov,
            "markov_rank": self.rank,
            "mask_token_id": self.mask_id,
            "sample_from_anchor": self.from_anchor,
            "sliding_window_non_causal": self.non_causal,
            "speculators_config": {"algorithm": "dspark"},
            "speculators_model_type": "dspark",
            "target_hidden_size": None,
            "transformer_layer_config": layers,
        }

    def write(self, path: Path, **changes: Any) -> Path:
        path.mkdir(parents=True, exist_ok=True)
        save_file(self.tensors, path / "model.safetensors", {"format": "pt"})
        (path / "config.json").write_text(json.dumps(self.config() | changes))
        return path

    def token_ids(self) -> Tensor:
        """Token id of each draft column."""
        offsets = self.tensors.get("d2t", torch.zeros(self.columns, dtype=torch.int64))
        return offsets + torch.arange(self.columns)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def _rotate(x: Tensor, positions: Tensor, p: Published) -> Tensor:
    half, angles, size = x.shape[-1] // 2, [], 1.0
    for plane in range(half):
        turn, by = THETA ** (-plane / half), p.rotary
        if by["rope_type"] == "yarn":
            most, size = by["original_max_position_embeddings"], 1 + 0.1 * math.log(by["factor"])
            quick, slow = (
                half * math.log(most / (turns * 2 * math.pi)) / math.log(THETA) for turns in (32, 1)
            )
            first, last = max(math.floor(quick), 0), math.ceil(slow)
            part = min(max((plane - first) / (last - first), 0), 1)
            turn = turn * (1 - part) + turn / by["factor"] * part
        if by["rope_type"] == "llama3":
            most, wave = by["original_max_position_embeddings"], 2 * math.pi / turn
            low, high = by["low_freq_factor"], by["high_freq_factor"]
            if wave > most / low:
                turn = turn / by["factor"]
            elif wave >= most / high:
                smooth = (most / wave - low) / (high - low)
                turn = (1 - smooth) * turn / by["factor"] + smooth * turn
        angles.append(turn)
    angle = positions[:, None] * torch.tensor(angles)  # [n, half]
    cos, sin = size * angle.cos()[:, None], size * angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def hidden_rows(p: Published, features: Tensor, anchor: int) -> Tensor:
    """Final hidden rows [block, d] behind features [n, 2 d] of the tokens before the anchor."""
    t, n, b = p.tensors, len(features), p.block
    ids = torch.tensor([anchor, *[p.mask_id] * (b - 1)])
    assert p.embed is not None
    x, base = p.embed[ids], _norm(linear(features, t["fc.weight"]), t["hidden_norm.weight"])
    positions = torch.cat([torch.arange(n), n + torch.arange(b)])
    for i in range(p.layers):
        at = f"layers.{i}."
        y = _norm(x, t[f"{at}input_layernorm.weight"])

        def heads(name: str, rows: Tensor, at: str = at) -> Tensor:
            return linear(rows, t[f"{at}self_attn.{name}.weight"]).unflatten(-1, (-1, p.head_dim))

        q = _norm(heads("q_proj", y), t[f"{at}self_attn.q_norm.weight"])
        both = torch.cat([base, y])
        k = _norm(heads("k_proj", both), t[f"{at}self_attn.k_norm.weight"])
        q, k = _rotate(q, positions[n:], p), _rotate(k, positions, p)
        v = heads("v_proj", both)
        seen = torch.ones(b, n + b, dtype=torch.bool)
        if i in p.sliding and p.window is not None:
            seen[:, :n] = torch.arange(n) >= n - p.window
            if not p.non_causal:
                seen[:, n:] = torch.ones(b, b).tril().bool()
        out = []
        for h in range(p.heads):
            g = h // (p.heads // p.kv_heads)
            score = (q[:, h] @ k[:, g].T / p.head_dim**0.5).masked_fill(~seen, -torch.inf)
            out.append(softmax(score, -1) @ v[:, g])
        x = x + linear(torch.cat(out, -1), t[f"{at}self_attn.o_proj.weight"])
        y = _norm(x, t[f"{at}post_attention_layernorm.weight"])
        gate = silu(linear(y, t[f"{at}mlp.gate_proj.weight"]))
        y = gate * linear(y, t[f"{at}mlp.up_proj.weight"])
        x = x + linear(y, t[f"{at}mlp.down_proj.weight"])
    return _norm(x, t["norm.weight"])


@dataclass
class Drafted:
    """tokens [g]: greedy, of the target; probs [g, V]: at temperature 1; confidence: logits [g]."""

    tokens: list[int]
    probs: Tensor
    confidence: Tensor


def drafts(p: Published, features: Tensor, anchor: int) -> Drafted:
    """Draft one block greedily."""
    t, h, ids = p.tensors, hidden_rows(p, features, anchor), p.token_ids()
    rows = range(0 if p.from_anchor else 1, p.block)
    previous, tokens, probs, confidence = anchor, [], [], []
    state = torch.zeros(p.rank)
    for k in rows:
        embedded = t["markov_head.markov_w1.weight"][previous]
        latent = embedded
        if p.markov == "gated":
            joined = torch.cat([h[k], embedded])
            weight, bias = t["markov_head.gate_proj.weight"], t["markov_head.gate_proj.bias"]
            latent = torch.sigmoid(linear(joined, weight, bias)) * embedded
        elif p.markov == "rnn":
            joined = torch.cat([state, embedded, h[k]])
            weight, bias = t["markov_head.joint_proj.weight"], t["markov_head.joint_proj.bias"]
            gate, candidate, out = linear(joined, weight, bias).chunk(3)
            gate = torch.sigmoid(gate)
            state, latent = gate * state + (1 - gate) * torch.tanh(candidate), torch.tanh(out)
        logits = linear(h[k], t["lm_head.weight"]) + linear(
            latent, t["markov_head.markov_w2.weight"]
        )
        wide = torch.zeros(p.vocab)
        wide[ids] = softmax(logits, -1)
        probs.append(wide)
        inputs = torch.cat([h[k], embedded]) if p.with_markov else h[k]
        weight, bias = t["confidence_head.proj.weight"], t["confidence_head.proj.bias"]
        confidence.append(linear(inputs, weight, bias)[0])
        previous = int(ids[logits.argmax()])
        tokens.append(previous)
    return Drafted(tokens, torch.stack(probs), torch.stack(confidence))
