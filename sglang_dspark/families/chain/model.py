"""Drafters of one layer that run once a token: the common part of Eagle3 and MTP.

Step k reads the token x_{k-1} and a state: the target's for the anchor, the drafter's own output of
the previous step for later drafts. The layer is a Llama layer, as in SGLang's llama_eagle3.py and
llama_eagle.py. An entry of its context is the pair (token at j, target's state at j - 1) and has
rotary position j - 1, the position of the state.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dspark.common.files import brief
from sglang_dspark.drafter.attention import ContextKV, RMSNorm, rope
from sglang_dspark.drafter.families import rope_theta
from sglang_dspark.drafter.fields import require_declared
from sglang_dspark.errors import DSparkError
from sglang_dspark.families.vocabulary import check_draft_ids

# Attention of one step: queries [R, 1, Hq, D], own keys and values [R, k, Hkv, D] of the steps so
# far (this one included) -> [R, 1, Hq, D]; it includes the context that it was made with.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ChainConfig:
    """Shape of a one-layer drafter.

    gamma: steps it was trained for; it can be run for fewer or more. draft_vocab_size: tokens it
    can draft, at most vocab_size.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    gamma: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        def require(ok: bool, what: str) -> None:
            if not ok:
                raise DSparkError(f"drafter config: {what}")

        require_declared(self)
        require(self.gamma >= 1, f"gamma must be at least 1, found {self.gamma}")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"{self.num_heads} heads cannot share {self.num_kv_heads} key/value heads",
        )
        require(
            1 <= self.draft_vocab_size <= self.vocab_size,
            f"draft_vocab_size {self.draft_vocab_size} must lie in 1..{self.vocab_size}",
        )

    def to_json(self) -> dict[str, Any]:
        """Return the Llama part of `config.json`."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "max_position_embeddings": self.max_position_embeddings,
            "gamma": self.gamma,
        }


# Fields of config.json that change what SGLang's classes compute, and the values that do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
    "sliding_window": (),
    "partial_rotary_factor": (1.0,),
    "norm_output": (False,),
    "norm_before_fc": (False,),
    "fc_norm": (False,),
    "use_aux_norm": (False,),
}


def refuse_unread(raw: Mapping[str, Any]) -> None:
    """Raise DSparkError for the first field that chain drafters here do not compute."""
    eagle = raw.get("eagle_config") or {}
    for name, allowed in _NEUTRAL.items():
        for place in (raw, eagle):
            value = place.get(name)
            if value is not None and not any(value == each for each in allowed):
                raise DSparkError(
                    f"{name} {brief(repr(value), 60)} is not supported; use a drafter of one plain "
                    "Llama layer, or serve it with SGLang's own algorithm"
                )
    wide = raw.get("target_hidden_size")
    if wide is not None and wide != raw.get("hidden_size"):
        raise DSparkError(
            f"target_hidden_size {brief(repr(wide), 40)} beside a hidden_size of "
            f"{brief(repr(raw.get('hidden_size')), 40)} is not supported; serve it with SGLang's "
            "own algorithm"
        )
    if eagle.get("use_aux_hidden_state") is False:
        raise DSparkError(
            "use_aux_hidden_state false (no layers' features) is not supported; serve it with "
            "SGLang's own algorithm"
        )


def chain_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return `ChainConfig`'s fields from a Llama-style config.json.

    Raises KeyError for a missing field, DSparkError for one that is not computed.
    """
    refuse_unread(raw)
    heads = raw["num_attention_heads"]
    return {
        "hidden_size": raw["hidden_size"],
        "intermediate_size": raw["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": raw.get("num_key_value_heads", heads),
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
        "vocab_size": raw["vocab_size"],
        "draft_vocab_size": raw.get("draft_vocab_size") or raw["vocab_size"],
        "gamma": raw.get("gamma") or 1,
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "rope_theta": rope_theta(raw),
        "max_position_embeddings": raw.get("max_position_embeddings", 8192),
    }


def require_one_layer(raw: Mapping[str, Any], kind: str) -> None:
    """Raise DSparkError unless config.json has one layer. kind: name of the drafter's kind."""
    if raw.get("num_hidden_layers") != 1:
        raise DSparkError(
            f"num_hidden_layers is {brief(raw.get('num_hidden_layers'), 40)}; {kind} drafters of "
            "one layer are supported"
        )


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply x [..., d] with rows [n, d] in the type of the rows -> [..., n] float32."""
    return nn.functional.linear(x.to(weight.dtype), weight).float()


@dataclass(frozen=True)
class WeightOps:
    """Read the target's embedding and LM head, which a backend may store in other formats.

    take_rows: (weight [V, d], ids [n] int64) -> weight [n, d] in a format that `multiply` reads.
    look_up: (weight [V, d], tokens [...] int64) -> [..., d]. multiply: (x [..., d], weight [n, d])
    -> [..., n] float32.
    """

    take_rows: Callable[[Tensor, Tensor], Tensor] = Tensor.__getitem__
    look_up: Callable[[Tensor, Tensor], Tensor] = Tensor.__getitem__
    multiply: Callable[[Tensor, Tensor], Tensor] = multiply


class ChainAttention(nn.Module):
    """Projections of a Llama attention whose input may be wider than its output."""

    def __init__(self, c: ChainConfig, width: int):
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(width, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(width, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(width, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)

    def queries_keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x [..., width] at positions [...] to rotated queries and keys, and values.

        Returns queries [..., Hq, D] and keys, values [..., Hkv, D].
        """
        heads, shape = [self.c.num_heads, self.c.num_kv_heads], (*x.shape[:-1], -1, self.c.head_dim)
        projected = torch.cat([self.q_proj(x).view(shape), self.k_proj(x).view(shape)], -2)
        q, k = rope(projected, positions, self.c.rope_theta).split(heads, -2)
        return q, k, self.v_proj(x).view(shape)

    def keys_values(self, x: Tensor, positions: Tensor) -> ContextKV:
        """Project x [..., width] at positions [...] to rotated keys, and values, [..., Hkv, D]."""
        shape = (*x.shape[:-1], self.c.num_kv_heads, self.c.head_dim)
        k = rope(self.k_proj(x).view(shape), positions, self.c.rope_theta)
        return k, self.v_proj(x).view(shape)


class ChainMLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: ChainConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class ChainDrafter(nn.Module, ABC):
    """One layer around the target's embedding.

    `Eagle3Drafter` and `MTPDrafter` define its input and its head.
    """

    embed_weight: Tensor
    draft_ids: Tensor | None
    config: ChainConfig
    reads_features: bool  # the target's states are layer features; else its last hidden state
    target_layer_ids: tuple[int, ...]

    def __init__(self, config: ChainConfig, width: int, draft_ids: Tensor | None):
        """Make the layer. width: of its input. draft_ids [V'] ascending; None: all tokens."""
        super().__init__()
        check_draft_ids(draft_ids, config.vocab_size)
        columns = config.vocab_size if draft_ids is None else len(draft_ids)
        if columns != config.draft_vocab_size:
            raise ValueError(
                f"{columns} draft tokens, but draft_vocab_size is {config.draft_vocab_size}"
            )
        self.config, self.ops = config, WeightOps()
        self.self_attn = ChainAttention(config, width)
        self.mlp = ChainMLP(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        empty = torch.empty(0, config.hidden_size)
        self.register_buffer("embed_weight", empty, persistent=False)
        self.register_buffer("draft_ids", draft_ids, persistent=False)

    @abstractmethod
    def attach(self, embed_tokens: Tensor, lm_head: Tensor) -> None:
        """Share the target's embedding and LM head [V, d]."""

    @abstractmethod
    def fuse(self, states: Tensor) -> Tensor:
        """Map the target's states [..., w] to a step's second input next to the token, [..., d]."""

    @abstractmethod
    def enter(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Map embedded, hidden [..., d] to residual [..., d], attention input [..., width]."""

    @abstractmethod
    def logits(self, out: Tensor) -> Tensor:
        """Map the layer's output [..., d] to logits over the draft vocabulary [..., V']."""

    @property
    def state_width(self) -> int:
        """Return w, the width of the target's states."""
        d = self.config.hidden_size
        return d * len(self.target_layer_ids) if self.reads_features else d

    def embedded(self, tokens: Tensor) -> Tensor:
        """Look up tokens [...] -> [..., d]."""
        return self.ops.look_up(self.embed_weight, tokens)

    def context_kv(self, tokens: Tensor, states: Tensor, positions: Tensor) -> ContextKV:
        """Return keys, values [..., Hkv, D] of entries (token at j, target's state at j - 1).

        tokens [...], states [..., w], positions [...] of the states.
        """
        _, x = self.enter(self.embedded(tokens), self.fuse(states))
        return self.self_attn.keys_values(x, positions)

    def unroll(
        self, states: Tensor, positions: Tensor, token_at: Callable[[int], Tensor], attend: Attend
    ) -> Iterator[Tensor]:
        """Yield the layer's output [R, d] at step 1, 2, ...; endless.

        states [R, w]: the target's before the anchor; positions [R]: theirs. token_at(k): token
        x_{k-1} [R] that step k reads, called when the step begins.
        """
        hidden = self.fuse(states)[:, None].float()  # [R, 1, d], the residual stream
        keys, values, k = [], [], 0
        while True:
            k += 1
            residual, x = self.enter(self.embedded(token_at(k))[:, None], hidden)
            at = (positions + (k - 1))[:, None]
            query, key, value = self.self_attn.queries_keys_values(x, at)
            keys.append(key)
            values.append(value)
            out = attend(query, torch.cat(keys, 1), torch.cat(values, 1))
            residual = residual + self.self_attn.o_proj(out.flatten(-2))
            hidden = residual + self.mlp(self.post_attention_layernorm(residual))
            yield hidden[:, 0]
