"""Define the parallel backbone: a stack of layers over [anchor, mask, mask, ..].

One pass computes the whole block, with the target's hidden states injected as keys and values of
every layer (paper, 3.1.1). Layers are dense or have experts (drafter/moe.py), on one residual
stream or on several.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sglang_dspark.drafter.attention import BlockAttention, ContextKV, PackedLayout, RMSNorm
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.drafter.gemma4 import Gemma4Layer
from sglang_dspark.drafter.hyper_connections import HyperConnection, StreamRead, open_streams
from sglang_dspark.drafter.moe import MoE


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP, the latter dense or of experts."""

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.self_attn = BlockAttention(c)
        self.mlp = MoE(c) if c.num_experts else MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attn_residual = HyperConnection(c.residual_streams, c.hidden_size, c.rms_norm_eps)
        self.mlp_residual = HyperConnection(c.residual_streams, c.hidden_size, c.rms_norm_eps)

    def forward(
        self, x: Tensor, positions: Tensor, context: ContextKV, visible: Tensor | PackedLayout
    ) -> Tensor:
        """Map x [..., gamma, d], or [..., gamma, n, d] of n streams, to the same shape.

        Other arguments as in `BlockAttention`.
        """
        x = self.attn_residual(
            x, lambda y: self.self_attn(self.input_layernorm(y), positions, context, visible)
        )
        return self.mlp_residual(x, lambda y: self.mlp(self.post_attention_layernorm(y)))


class Backbone(nn.Module):
    """Projection of target features, draft layers, final norm."""

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.fc = nn.Linear(len(c.target_layer_ids) * c.hidden_size, c.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        kind = Gemma4Layer if c.family == "gemma4" else DraftLayer
        self.layers: Sequence[DraftLayer] = nn.ModuleList(  # type: ignore[assignment]
            kind(c) for _ in range(c.num_layers)
        )
        for index in c.full_layers or ():
            self.layers[index].self_attn.see_everything()
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.streams = c.residual_streams
        if self.streams > 1:
            self.stream_read = StreamRead(self.streams, c.hidden_size, c.rms_norm_eps)

    def context_kv(self, features: Tensor, positions: Tensor) -> list[ContextKV]:
        """Map features [..., m*d] at positions [...] to keys, values [..., Hkv, D] per layer."""
        x = self.hidden_norm(self.fc(features))
        return [layer.self_attn.keys_values(x, positions) for layer in self.layers]

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        context: Sequence[ContextKV],
        visible: Tensor | PackedLayout,
    ) -> Tensor:
        """Map embedded blocks x [..., gamma, d] at anchor positions [...] to h [..., gamma, d]."""
        steps = torch.arange(x.shape[-2], device=x.device)
        block_positions = positions[..., None] + steps  # [..., gamma]
        if self.streams > 1:
            x = open_streams(x, self.streams)  # [..., gamma, n, d]
        for layer, kv in zip(self.layers, context, strict=True):
            x = layer(x, block_positions, kv, visible)
        return self.norm(self.stream_read(x) if self.streams > 1 else x)
