"""Compute the attention of a draft block.

Every position sees the target's context before its anchor and all positions of its own block, in
both directions, and no other block (paper, 3.1.1).

Context and block keys are scored separately and share one softmax, so that many blocks of one
sequence share its context keys. `block_attention` supports sequences of one length.
`packed_attention` supports contexts end to end and densely packed blocks, separated by token-level
indices instead of a dense mask over the packed length (paper, 5.1).
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor, nn

from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.drafter.rotary import Scaling

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


def rope(
    x: Tensor,
    positions: Tensor,
    theta: float,
    share: float = 1.0,
    scaling: Scaling | None = None,
) -> Tensor:
    """Apply the rotary embedding, half-split layout.

    x [..., H, D], positions [...] broadcast over H. share: part of the D/2 planes that rotate, the
    fastest ones; the others do not.
    """
    half = x.shape[-1] // 2
    plane = torch.arange(half, device=x.device, dtype=torch.float32)
    frequency = theta ** (-plane / half)
    if scaling is not None:
        frequency = scaling.scale(frequency, theta)
    if share < 1:
        frequency = frequency * (plane < int(share * half))
    angle = positions[..., None, None].float() * frequency  # [..., 1, D/2]
    size = 1.0 if scaling is None else scaling.magnitude
    cos, sin = size * angle.cos(), size * angle.sin()
    a, b = x[..., :half].float(), x[..., half:].float()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class PackedLayout:
    """Mask of the context tokens that each of P packed blocks may see.

    starts [S+1] int64: cumulative context lengths of S sequences; sequence [P] int64, ascending:
    the sequence of each block; positions [P] int64: a block sees the positions before this one of
    its sequence.
    """

    def __init__(self, starts: Tensor, sequence: Tensor, positions: Tensor):
        self.starts, self.sequence, self.positions = starts, sequence, positions

    @cached_property
    def context_lengths(self) -> list[int]:
        """Return the context tokens of each sequence."""
        return self.starts.diff().tolist()

    @cached_property
    def block_counts(self) -> list[int]:
        """Return the number of blocks of each sequence."""
        return torch.bincount(self.sequence, minlength=len(self.starts) - 1).tolist()

    @cached_property
    def padded_context(self) -> Tensor:
        """Return rows of the packed context, padded with rows that no block sees: [S, T]."""
        steps = torch.arange(max(self.context_lengths), device=self.starts.device)
        return (self.starts[:-1, None] + steps).clamp(max=int(self.starts[-1]) - 1)

    @cached_property
    def padded_blocks(self) -> tuple[Tensor, Tensor]:
        """Return blocks by sequence [S, A], padded with others, and each block's place [P]."""
        counts = torch.tensor(self.block_counts, device=self.starts.device)
        first = counts.cumsum(0) - counts
        width = max(self.block_counts)
        index = (first[:, None] + torch.arange(width, device=first.device)).clamp(
            max=len(self.sequence) - 1
        )
        rank = torch.arange(len(self.sequence), device=first.device) - first[self.sequence]
        return index, self.sequence * width + rank


def block_attention(
    q: Tensor,  # [S, A, g, Hq, D]
    k: Tensor,  # [S, A, g', Hkv, D] of the block's own positions
    v: Tensor,
    context: ContextKV,  # keys, values [S, T, Hkv, D]
    visible: Tensor,  # [S, A] context tokens each block may see
    *,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:  # [S, A, g, Hq, D]
    """Compute grouped-query attention of A blocks in each of S sequences.

    causal: query i of g sees the own keys up to g' - g + i; otherwise all own keys. window: all
    positions of a block see only the last `window` of its visible context tokens, and its own keys
    as without a window.
    """
    s, a, g, heads, dim = q.shape
    ck, cv = context
    q = (q * dim**-0.5).view(s, a, g, k.shape[3], heads // k.shape[3], dim)
    far = torch.einsum("sagkhd,stkd->skahgt", q, ck)
    steps = torch.arange(ck.shape[1], device=q.device)
    hidden = steps >= visible[..., None]  # [S, A, T]
    if window is not None:
        hidden = hidden | (steps < visible[..., None] - window)
    far = far.masked_fill(hidden[:, None, :, None, None], float("-inf"))
    near = torch.einsum("sagkhd,sajkd->skahgj", q, k)
    if causal:
        later = torch.ones(near.shape[-2:], dtype=torch.bool, device=q.device)
        near = near.masked_fill(later.triu(k.shape[2] - g + 1), float("-inf"))
    weight = torch.cat([far, near], -1).float().softmax(-1).to(v.dtype)
    far, near = weight.split([ck.shape[1], k.shape[2]], -1)
    out = torch.einsum("skahgt,stkd->sagkhd", far, cv)
    out = out + torch.einsum("skahgj,sajkd->sagkhd", near, v)
    return out.reshape(s, a, g, heads, dim)


def packed_attention(
    q: Tensor,  # [P, g, Hq, D]
    k: Tensor,  # [P, g', Hkv, D] of the block's own positions
    v: Tensor,
    context: ContextKV,  # keys, values [N, Hkv, D] of all sequences end to end
    layout: PackedLayout,
    *,
    causal: bool = False,
    window: int | None = None,
    padded: bool | None = None,
) -> Tensor:  # [P, g, Hq, D]
    """Compute `block_attention` for packed blocks and contexts of different lengths; exact.

    padded: pad the contexts to the longest and make one call, instead of one call per sequence.
    None: pad except on a CPU, as many small calls are slow on a GPU and padding on a CPU.
    """
    if padded is None:
        padded = q.device.type != "cpu"
    if padded:
        rows, (blocks, back) = layout.padded_context, layout.padded_blocks
        wide = (context[0][rows], context[1][rows])
        visible = layout.positions[blocks]
        out = block_attention(
            q[blocks], k[blocks], v[blocks], wide, visible, causal=causal, window=window
        )
        return out.flatten(0, 1)[back]
    parts = zip(
        *(x.split(layout.block_counts) for x in (q, k, v, layout.positions)),
        *(x.split(layout.context_lengths) for x in context),
        strict=True,
    )
    outs = [
        block_attention(
            *(qs[None], ks[None], vs[None], (cks[None], cvs[None]), seen[None]),
            causal=causal,
            window=window,
        )[0]
        for qs, ks, vs, seen, cks, cvs in parts
    ]
    return torch.cat(outs)


class BlockAttention(nn.Module):
    """Grouped-query attention of draft blocks, S sequences x A blocks or packed."""

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.c = c
        self.window, self.causal = c.window, c.causal_window
        self.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def see_everything(self) -> None:
        """Attend to all of the context and of the block, also in a layer with a window."""
        self.window, self.causal = None, False

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """Project x [..., d] at positions [...] to normed and rotated queries [..., Hq, D]."""
        q = self.q_norm(self.q_proj(x).view(*x.shape[:-1], self.c.num_heads, self.c.head_dim))
        return rope(q, positions, self.c.rope_theta, scaling=self.c.rope_scaling)

    def keys_values(self, x: Tensor, positions: Tensor) -> ContextKV:
        """Project x [..., d], positions [...] to normed, rotated keys, and values [..., Hkv, D]."""
        shape = (*x.shape[:-1], self.c.num_kv_heads, self.c.head_dim)
        k = self.k_norm(self.k_proj(x).view(shape))
        k = rope(k, positions, self.c.rope_theta, scaling=self.c.rope_scaling)
        return k, self.v_proj(x).view(shape)

    def forward(
        self,
        x: Tensor,  # [S, A, gamma, d], or packed [P, gamma, d]
        positions: Tensor,  # [S, A, gamma], or [P, gamma]
        context: ContextKV,  # keys, values [S, T, Hkv, D], or [N, Hkv, D]
        visible: Tensor | PackedLayout,  # [S, A] context tokens each block may see
    ) -> Tensor:  # as x
        q = self.queries(x, positions)
        k, v = self.keys_values(x, positions)  # [..., gamma, Hkv, D]
        if isinstance(visible, PackedLayout):
            out = packed_attention(
                q, k, v, context, visible, causal=self.causal, window=self.window
            )
        else:
            out = block_attention(q, k, v, context, visible, causal=self.causal, window=self.window)
        return self.o_proj(out.flatten(-2))
