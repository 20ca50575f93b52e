"""Attention of a draft block: every position sees the target's context before its anchor and all
positions of its own block, in both directions, and no other block (paper, 3.1.1).

Context and block keys are scored apart and share one softmax, so that many blocks of one sequence
share its context keys without a dense mask over the packed length.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from sglang_dspark.drafter.config import DrafterConfig

ContextKV = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis, in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding, half-split layout. x [..., H, D], positions [...] broadcast over H."""
    half = x.shape[-1] // 2
    frequency = theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[..., None, None].float() * frequency  # [..., 1, D/2]
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class BlockAttention(nn.Module):
    """Grouped-query attention of S sequences x A blocks x gamma positions."""

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.c = c
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def keys_values(self, x: Tensor, positions: Tensor) -> ContextKV:
        """x [..., d], positions [...] -> normed and rotated keys, values [..., Hkv, D]."""
        shape = (*x.shape[:-1], self.c.num_kv_heads, self.c.head_dim)
        k = self.k_norm(self.k_proj(x).view(shape))
        return rope(k, positions, self.c.rope_theta), self.v_proj(x).view(shape)

    def forward(
        self,
        x: Tensor,  # [S, A, gamma, d]
        positions: Tensor,  # [S, A, gamma]
        context: ContextKV,  # keys, values [S, T, Hkv, D]
        visible: Tensor,  # [S, A] context tokens each block may see
    ) -> Tensor:  # [S, A, gamma, d]
        c = self.c
        s, a, g, _ = x.shape
        groups = c.num_heads // c.num_kv_heads
        q = self.q_norm(self.q_proj(x).view(s, a, g, c.num_heads, c.head_dim))
        q = rope(q, positions, c.rope_theta) * c.head_dim**-0.5
        q = q.view(s, a, g, c.num_kv_heads, groups, c.head_dim)
        k, v = self.keys_values(x, positions)  # [S, A, gamma, Hkv, D]
        ck, cv = context
        far = torch.einsum("sagkhd,stkd->skahgt", q, ck)
        hidden = torch.arange(ck.shape[1], device=x.device) >= visible[..., None]  # [S, A, T]
        far = far.masked_fill(hidden[:, None, :, None, None], float("-inf"))
        near = torch.einsum("sagkhd,sajkd->skahgj", q, k)
        weight = torch.cat([far, near], -1).float().softmax(-1).to(v.dtype)
        far, near = weight.split([ck.shape[1], g], -1)
        out = torch.einsum("skahgt,stkd->sagkhd", far, cv)
        out = out + torch.einsum("skahgj,sajkd->sagkhd", near, v)
        return self.o_proj(out.reshape(s, a, g, c.num_heads * c.head_dim))
