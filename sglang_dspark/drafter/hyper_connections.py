"""Manifold-constrained hyper-connections (mHC; Xie et al., 2025): n residual streams, not one.

Around a block F the streams x [..., n, d] become

    x' = H_res x + h_post F(h_pre x),    h_pre [1, n] in (0, 1), h_post [n, 1] in (0, 2)

with H_res [n, n] doubly stochastic: it mixes streams but keeps their mean, through any number of
layers. All three are alpha * (rms-normed streams) phi + b, squashed by a sigmoid, twice a sigmoid,
and Sinkhorn-Knopp. With n = 1 the module is x + F(x), without parameters. Any n starts close to
that: h_pre averages, h_post is 1.

Mixing is computed in float32 (float64 for such streams) and cast to the dtype of the streams.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

SINKHORN_ROUNDS = 20
_ALPHA = 0.01  # the dynamic part starts small


def doubly_stochastic(logits: Tensor, rounds: int = SINKHORN_ROUNDS) -> Tensor:
    """Apply Sinkhorn-Knopp to exp(logits): [..., n, n] -> the same, rows and columns sum to 1.

    Rounds run on logarithms, so no exponential overflows. They converge slowly for logits far
    apart, so the remainder after `rounds` is corrected exactly: rows and columns that exceed 1 are
    scaled down and the rest is spread by its marginals (Altschuler et al., 2017, algorithm 2). The
    sums are then 1 up to rounding for every finite input, and the result has a gradient.
    """
    logs = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    for _ in range(rounds):
        logs = logs - logs.logsumexp(-1, keepdim=True)
        logs = logs - logs.logsumexp(-2, keepdim=True)
    mixing = logs.exp()
    mixing = mixing / mixing.sum(-1, keepdim=True).clamp(min=1)
    mixing = mixing / mixing.sum(-2, keepdim=True).clamp(min=1)
    rows = (1 - mixing.sum(-1, keepdim=True)).clamp(min=0)  # [..., n, 1]
    columns = (1 - mixing.sum(-2, keepdim=True)).clamp(min=0)  # [..., 1, n]
    # Below one rounding there is nothing to spread, and a smaller divisor would blow up gradients.
    missing = rows.sum(-2, keepdim=True).clamp(min=torch.finfo(mixing.dtype).eps)
    return mixing + rows * (columns / missing)


class _Coefficients(nn.Module):
    """Coefficients of mixing, computed from the streams: alpha * rmsnorm(vec(x)) phi + b."""

    def __init__(self, n: int, width: int, size: int, start: Tensor):
        super().__init__()
        self.phi = nn.Parameter(torch.randn(size, n * width) * (n * width) ** -0.5)
        self.alpha = nn.Parameter(torch.tensor(_ALPHA))
        self.bias = nn.Parameter(start.clone())

    def forward(self, projected: Tensor) -> Tensor:
        """Map rmsnorm(vec(x)) phi^T [..., size] to coefficients [..., size]."""
        return self.alpha * projected + self.bias


def _projected(streams: Tensor, parts: Sequence[_Coefficients], eps: float) -> Sequence[Tensor]:
    """Return rmsnorm(vec(streams)) phi^T of every part, [..., n, d] -> [..., size] each.

    Results are at least float32. There is one product for all parts, and the norm divides its
    result: streams are wide, results are not.
    """
    x = streams.flatten(-2)
    x = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    phi = torch.cat([p.phi for p in parts]).to(x.dtype)
    with torch.autocast(x.device.type, enabled=False):
        size = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = torch.rsqrt(size.square() / x.shape[-1] + eps)
        out = nn.functional.linear(x, phi) * scale
    return out.split([len(p.phi) for p in parts], -1)


def _mixed(weight: Tensor, streams: Tensor) -> Tensor:
    """Multiply [..., m, n] x [..., n, d] in the weights' dtype, which autocast would change."""
    with torch.autocast(streams.device.type, enabled=False):
        return weight @ streams.to(weight.dtype)


def _written(share: Tensor, out: Tensor, kept: Tensor, x: Tensor) -> Tensor:
    """Compute kept x + share out: share [..., n], out [..., d], kept [..., n, n], x [..., n, d]."""
    n, width = x.shape[-2:]
    with torch.autocast(x.device.type, enabled=False):
        fresh = share.reshape(-1, n, 1) @ out.reshape(-1, 1, width).to(share.dtype)
        streams = x.reshape(-1, n, width).to(kept.dtype)
        return torch.baddbmm(fresh, kept.reshape(-1, n, n), streams).view(x.shape)


class StreamRead(nn.Module):
    """One state from n streams, weighted by sigmoids: [..., n, d] -> [..., d]."""

    def __init__(self, n: int, width: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        start = torch.full((n,), -math.log(max(n - 1, 1)))  # sigmoid 1/n each: the mean
        self.weights = _Coefficients(n, width, n, start)

    def forward(self, streams: Tensor) -> Tensor:
        """Map [..., n, d] to [..., d] in the streams' dtype."""
        return self.read(streams, *_projected(streams, [self.weights], self.eps))

    def read(self, streams: Tensor, projected: Tensor) -> Tensor:
        """Run `forward` on streams that are projected [..., n] already."""
        weight = torch.sigmoid(self.weights(projected))
        return _mixed(weight[..., None, :], streams)[..., 0, :].to(streams.dtype)


class HyperConnection(nn.Module):
    """The residual connection around one block: n streams, or the plain one for n = 1."""

    def __init__(self, n: int, width: int, eps: float = 1e-6):
        super().__init__()
        if n < 1:
            raise ValueError(f"a residual needs at least one stream, found {n}")
        self.n, self.eps = n, eps
        if n > 1:
            self.read = StreamRead(n, width, eps)
            self.write = _Coefficients(n, width, n, torch.zeros(n))
            self.mix = _Coefficients(n, width, n * n, 2 * torch.eye(n).flatten())

    def forward(self, x: Tensor, block: Callable[[Tensor], Tensor]) -> Tensor:
        """Connect block, [..., d] -> [..., d], to x [..., n, d], or [..., d] for n = 1."""
        if self.n == 1:
            return x + block(x)
        parts = [self.read.weights, self.write, self.mix]
        read, write, mix = _projected(x, parts, self.eps)
        kept = doubly_stochastic(self.mix(mix).unflatten(-1, (self.n, self.n)))
        share = 2 * torch.sigmoid(self.write(write))  # [..., n]
        out = block(self.read.read(x, read))
        return _written(share, out, kept, x).to(x.dtype)


def open_streams(x: Tensor, n: int) -> Tensor:
    """Copy x [..., d] to n streams [..., n, d]."""
    return x[..., None, :].expand(*x.shape[:-1], n, x.shape[-1])
