"""Define draft layers in Gemma4's shape, as DeepSpec's `Gemma4DSparkModel` trains them.

They are for Gemma4 targets and differ from Qwen3's (drafter/backbone.py) in these: values are
normed without a weight and may be the keys' own projection; attention scores are not divided by
sqrt(D); only a share of the rotary planes rotates; attention and MLP are normed before and after;
GELU instead of SiLU; the output of a layer is scaled. The embedding is scaled by sqrt(d) and base
logits are capped (drafter/model.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang_dspark.drafter.attention import (
    BlockAttention,
    ContextKV,
    PackedLayout,
    RMSNorm,
    rope,
)
from sglang_dspark.drafter.config import DrafterConfig


class Gemma4Attention(BlockAttention):
    """Attention of draft blocks with Gemma4's norms and scale."""

    def __init__(self, c: DrafterConfig):
        super().__init__(c)
        if c.keys_are_values:
            del self.v_proj

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """Compute `BlockAttention.queries` times sqrt(D), which scores are divided by."""
        q = self.q_norm(self.q_proj(x).view(*x.shape[:-1], self.c.num_heads, self.c.head_dim))
        q = rope(q, positions, self.c.rope_theta, self.c.rotary_share)
        return q * self.c.head_dim**0.5

    def keys_values(self, x: Tensor, positions: Tensor) -> ContextKV:
        """Compute `BlockAttention.keys_values`; values are normed without a weight."""
        c = self.c
        shape = (*x.shape[:-1], c.num_kv_heads, c.head_dim)
        keys = self.k_proj(x).view(shape)
        values = keys if c.keys_are_values else self.v_proj(x).view(shape)
        values = values.float()
        size = values.pow(2).mean(-1, keepdim=True) + c.rms_norm_eps
        rotated = rope(self.k_norm(keys), positions, c.rope_theta, c.rotary_share)
        return rotated, values * torch.rsqrt(size)


class Gemma4MLP(nn.Module):
    """Gated by GELU (tanh form)."""

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = nn.functional.gelu(self.gate_proj(x), approximate="tanh")
        return self.down_proj(gate * self.up_proj(x))


class Gemma4Layer(nn.Module):
    """Attention and MLP, each normed before and after."""

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.self_attn = Gemma4Attention(c)
        self.mlp = Gemma4MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.pre_feedforward_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.layer_scalar = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(
        self, x: Tensor, positions: Tensor, context: ContextKV, visible: Tensor | PackedLayout
    ) -> Tensor:
        """Map x [..., gamma, d] to the same shape; arguments as in `BlockAttention`."""
        y = self.self_attn(self.input_layernorm(x), positions, context, visible)
        x = x + self.post_attention_layernorm(y)
        y = self.mlp(self.pre_feedforward_layernorm(x))
        return (x + self.post_feedforward_layernorm(y)) * self.layer_scalar
