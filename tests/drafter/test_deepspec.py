"""DeepSpec's checkpoints, Qwen3 and Gemma4: small random ones, built from Transformers' own modules
the way its models are, draft the same tokens with the same probabilities here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Gemma4TextConfig, Qwen3Config
from transformers.models.gemma4 import modeling_gemma4 as gemma4
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from sglang_dspark.drafter import load_drafter, save_drafter
from sglang_dspark.drafter.deepspec import save_deepspec
from sglang_dspark.errors import DSparkError

VOCAB, WIDTH, HEADS, GAMMA, RANK, DEPTH = 53, 32, 4, 3, 8, 2
OPTIONS: dict[str, Any] = {
    "num_target_layers": 4,
    "target_layer_ids": [0, 2],
    "mask_token_id": 3,
    "num_anchors": 7,
    "block_size": GAMMA,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "tie_word_embeddings": False,
}
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": DEPTH,
    "num_attention_heads": HEADS,
    "layer_types": ["full_attention"] * DEPTH,
}
CASES = ("qwen3", "gemma4", "gemma4-shared")


class _Attention(nn.Module):
    """Projections and norms of one layer; full attention over [context; block]."""

    def __init__(self, norm: Any, head_dim: int, kv_heads: int, scale: float, shared: bool):
        super().__init__()
        self.scale, self.head_dim = scale, head_dim
        self.q_proj = nn.Linear(WIDTH, HEADS * head_dim, bias=False)
        self.k_proj = nn.Linear(WIDTH, kv_heads * head_dim, bias=False)
        self.v_proj = None if shared else nn.Linear(WIDTH, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(HEADS * head_dim, WIDTH, bias=False)
        self.q_norm, self.k_norm = norm(head_dim), norm(head_dim)

    def forward(self, x: Tensor, context: Tensor, turn: Any, v_norm: Any) -> Tensor:
        """x [gamma, d], context [T, d] -> [gamma, d]; turn: rotary embedding of [H, n, D]."""
        both = torch.cat([context, x])
        split = (-1, self.head_dim)
        q = self.q_norm(self.q_proj(x).unflatten(-1, split)).transpose(0, 1)
        raw = self.k_proj(both).unflatten(-1, split)
        k = self.k_norm(raw).transpose(0, 1)
        v = raw if self.v_proj is None else self.v_proj(both).unflatten(-1, split)
        v = v_norm(v).transpose(0, 1)
        q, k = turn(q, len(context)), turn(k, 0)
        groups = HEADS // len(k)
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        weight = (q @ k.transpose(1, 2) * self.scale).softmax(-1)
        return self.o_proj((weight @ v).transpose(0, 1).flatten(1))


class _Reference(nn.Module):
    """A DeepSpec draft model: modules with its names, its order of operations."""

    def __init__(self, case: str):
        super().__init__()
        self.gemma, shared = case != "qwen3", case == "gemma4-shared"
        if self.gemma:
            self.config = Gemma4TextConfig(
                **COMMON,
                head_dim=8,
                global_head_dim=16,
                num_key_value_heads=2,
                num_global_key_value_heads=1 if shared else None,
                attention_k_eq_v=shared,
                final_logit_softcapping=5.0,
                hidden_size_per_layer_input=0,
            )
            dim, kv, scale = 16, 1 if shared else 2, 1.0
            self.kind, rotary = gemma4.Gemma4RMSNorm, gemma4.Gemma4TextRotaryEmbedding
        else:
            self.config = Qwen3Config(**COMMON, head_dim=8, num_key_value_heads=2)
            dim, kv, scale = 8, 2, 8**-0.5
            self.kind, rotary = qwen3.Qwen3RMSNorm, qwen3.Qwen3RotaryEmbedding
        self.layers = nn.ModuleList(self._layer(i, dim, kv, scale, shared) for i in range(DEPTH))
        self.norm, self.hidden_norm = self.kind(WIDTH), self.kind(WIDTH)
        self.fc = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.markov_head = nn.ModuleDict(
            {
                "markov_w1": nn.Embedding(VOCAB, RANK),
                "markov_w2": nn.Linear(RANK, VOCAB, bias=False),
            }
        )
        self.confidence_head = nn.ModuleDict({"proj": nn.Linear(WIDTH + RANK, 1)})
        self.rotary = rotary(self.config)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.3)

    def _layer(self, index: int, dim: int, kv: int, scale: float, shared: bool) -> nn.Module:
        layer = nn.Module()
        layer.self_attn = _Attention(self.kind, dim, kv, scale, shared)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if self.gemma:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
            layer.mlp = gemma4.Gemma4TextMLP(self.config, index)
            layer.register_buffer("layer_scalar", torch.tensor([0.7]))
        else:
            layer.mlp = qwen3.Qwen3MLP(self.config)
        for name in norms:
            setattr(layer, name, self.kind(WIDTH))
        return layer

    def _turn(self, length: int) -> Any:
        at = torch.arange(length)[None]
        like = torch.zeros(1, length, WIDTH)
        extra = ("full_attention",) if self.gemma else ()
        cos, sin = (t[0] for t in self.rotary(like, at, *extra))

        def turn(x: Tensor, first: int) -> Tensor:
            half = x.shape[-1] // 2
            other = torch.cat([-x[..., half:], x[..., :half]], -1)
            return x * cos[first:] + other * sin[first:]

        return turn

    def hidden(self, anchor: int, features: Tensor) -> Tensor:
        """h [gamma, d] of the block behind features [p, 2d]."""
        context = self.hidden_norm(self.fc(features))
        ids = torch.tensor([anchor] + [OPTIONS["mask_token_id"]] * (GAMMA - 1))
        x = self.embed_tokens(ids) * (WIDTH**0.5 if self.gemma else 1.0)
        turn = self._turn(len(features) + GAMMA)
        v_norm = self.kind(16, with_scale=False) if self.gemma else nn.Identity()
        for layer in self.layers:
            y = layer.self_attn(layer.input_layernorm(x), context, turn, v_norm)
            if self.gemma:
                x = x + layer.post_attention_layernorm(y)
                y = layer.mlp(layer.pre_feedforward_layernorm(x))
                x = (x + layer.post_feedforward_layernorm(y)) * layer.layer_scalar
            else:
                x = x + y
                x = x + layer.mlp(layer.post_attention_layernorm(x))
        return self.norm(x)

    def step(self, h: Tensor, previous: int) -> tuple[Tensor, Tensor]:
        """Logits [V] and confidence logit of one position."""
        logits = self.lm_head(h)
        if self.gemma:
            logits = torch.tanh(logits / 5.0) * 5.0
        embedded = self.markov_head["markov_w1"](torch.tensor(previous))
        confidence = self.confidence_head["proj"](torch.cat([h, embedded]))
        return logits + self.markov_head["markov_w2"](embedded), confidence[0]

    def save(self, path: Path) -> None:
        raw = self.config.to_dict() | OPTIONS
        raw["architectures"] = ["Gemma4DSparkModel" if self.gemma else "Qwen3DSparkModel"]
        if self.gemma:  # as DeepSpec's release of Transformers wrote them
            raw |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
        (path / "config.json").write_text(json.dumps(raw))
        save_file(dict(self.state_dict()), str(path / "model.safetensors"))


@pytest.fixture(params=CASES)
def reference(request: pytest.FixtureRequest) -> _Reference:
    torch.manual_seed(3)
    return _Reference(request.param).eval()


@torch.no_grad()
def test_drafts_as_deepspec_does(reference: _Reference, tmp_path: Path) -> None:
    reference.save(tmp_path)
    embed, head = reference.embed_tokens.weight, reference.lm_head.weight
    drafter = load_drafter(tmp_path, embed, head)
    assert drafter.config.family == ("gemma4" if reference.gemma else "qwen3")
    features, anchor = torch.randn(9, 2 * WIDTH), 5
    lens = torch.tensor([9])
    context = drafter.context_kv(features[None], torch.arange(9)[None])
    h = drafter.forward_block(torch.tensor([anchor]), lens, context, lens)
    torch.testing.assert_close(h[0], reference.hidden(anchor, features), atol=1e-4, rtol=1e-3)
    block = drafter.draft(
        torch.tensor([anchor]), h, torch.ones(1), torch.Generator().manual_seed(0)
    )
    previous = anchor
    for k in range(GAMMA):
        logits, confidence = reference.step(reference.hidden(anchor, features)[k], previous)
        torch.testing.assert_close(block.probs[0, k], logits.softmax(-1), atol=1e-4, rtol=1e-2)
        assert float(block.confidence_logits[0, k]) == pytest.approx(float(confidence), abs=1e-3)
        previous = int(block.tokens[0, k])


def test_export_is_read_back_by_both(reference: _Reference, tmp_path: Path) -> None:
    """Ours -> DeepSpec's names and options -> ours; every weight of DeepSpec's model is there."""
    reference.save(tmp_path)
    embed, head = reference.embed_tokens.weight, reference.lm_head.weight
    drafter = load_drafter(tmp_path, embed, head)
    save_deepspec(drafter, tmp_path / "again", torch.float32)
    kept = load_file(str(tmp_path / "again" / "model.safetensors"))
    theirs = reference.state_dict()
    assert kept.keys() == theirs.keys()
    assert all(torch.equal(kept[name], theirs[name]) for name in kept)
    raw = json.loads((tmp_path / "again" / "config.json").read_text())
    assert all(raw[name] == value for name, value in OPTIONS.items() if name != "num_anchors")
    again = load_drafter(tmp_path / "again", embed, head)
    assert again.config == drafter.config


def test_gemma4_is_not_written_for_sglang(tmp_path: Path) -> None:
    reference = _Reference("gemma4")
    reference.save(tmp_path)
    drafter = load_drafter(tmp_path, reference.embed_tokens.weight, reference.lm_head.weight)
    with pytest.raises(DSparkError, match="no gemma4 drafter"):
        save_drafter(drafter, tmp_path / "served")


@pytest.mark.parametrize(
    ("case", "change"),
    [
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("qwen3", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}),
        ("qwen3", {"hidden_act": "gelu"}),
        ("gemma4", {"enable_moe_block": True}),
        ("gemma4", {"hidden_size_per_layer_input": 16}),
        ("gemma4", {"hidden_activation": "silu"}),
    ],
)
def test_what_we_do_not_compute_is_refused(
    case: str, change: dict[str, Any], tmp_path: Path
) -> None:
    reference = _Reference(case)
    reference.save(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(DSparkError, match="is not supported"):
        load_drafter(tmp_path, reference.embed_tokens.weight, reference.lm_head.weight)
