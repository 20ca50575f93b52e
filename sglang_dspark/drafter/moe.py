"""Define a mixture of experts in a draft layer, as in DeepSeek-V3 (technical report, 2.1.2).

Every token goes through its top-k routed experts and through the shared experts.

    y = shared(x) + scaling * sum_{e in top-k(s + b)} w_e expert_e(x),   w_e = s_e / sum of chosen s

Scores s are sigmoids or the softmax of x W^T. The bias b only decides which experts are chosen. It
is not a trained weight: `balance_experts` moves it after each step towards equal loads, so there is
no auxiliary loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.errors import DSparkError


@dataclass(frozen=True)
class Routing:
    """Experts of T tokens. experts: [T, k] int64; weights: [T, k] float32, scaling included."""

    experts: Tensor
    weights: Tensor


class Router(nn.Module):
    """Scores of the experts, and the experts of each token."""

    e_score_correction_bias: Tensor
    load: Tensor

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.c = c
        self.weight = nn.Parameter(torch.empty(c.num_experts, c.hidden_size))
        nn.init.normal_(self.weight, std=c.hidden_size**-0.5)
        bias = torch.zeros(c.num_experts, dtype=torch.float32)
        self.register_buffer("e_score_correction_bias", bias)
        empty = torch.zeros(c.num_experts, dtype=torch.int64)
        self.register_buffer("load", empty, persistent=False)

    def forward(self, x: Tensor) -> Routing:
        """Route x [T, d] to experts. Loads are counted in training with gradients."""
        c = self.c
        with torch.autocast(x.device.type, enabled=False):
            logits = linear(x.float(), self.weight.float())  # [T, E]
        scores = logits.sigmoid() if c.router_scores == "sigmoid" else logits.softmax(-1)
        ranked = scores.detach() + self.e_score_correction_bias
        experts = ranked.topk(c.experts_per_token, -1, sorted=True).indices
        weights = scores.gather(-1, experts)
        if c.normalise_weights:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
        if self.training and torch.is_grad_enabled():
            chosen = experts.flatten()
            self.load.scatter_add_(0, chosen, torch.ones_like(chosen))
        return Routing(experts, weights * c.routed_scaling)


@dataclass(frozen=True)
class Permutation:
    """Token copies sorted by expert, ties in token order. The host reads no value.

    order: [T*k] int64, the copy (token * k + rank) at each place; back: its inverse;
    counts: [E] int64, copies of each expert.
    """

    order: Tensor
    back: Tensor
    counts: Tensor


def permute_tokens(experts: Tensor, num_experts: int) -> Permutation:
    """Sort the copies of tokens with experts [T, k] int64 by expert.

    On a CPU, raises DSparkError if an expert is outside 0..num_experts-1.
    """
    flat = experts.flatten()
    if flat.device.type == "cpu" and flat.numel():
        low, high = (int(v) for v in flat.aminmax())
        if low < 0 or high >= num_experts:
            raise DSparkError(f"routing names experts {low}..{high}, there are {num_experts}")
    order = flat.argsort(stable=True)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    return Permutation(order, back, counts.scatter_add_(0, flat, torch.ones_like(flat)))


class Experts(nn.Module):
    """E SwiGLU experts, their weights stacked: [E, I, d], [E, I, d], [E, d, I]."""

    def __init__(self, experts: int, inner: int, width: int):
        """Draw the weights. experts: E; inner: I; width: d."""
        super().__init__()
        self.gate_proj = _stacked(experts, inner, width)
        self.up_proj = _stacked(experts, inner, width)
        self.down_proj = _stacked(experts, width, inner)

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Return the weighted sum of each token's experts, x [T, d] -> [T, d]; deterministic.

        It makes one product per expert and reads the counts on the host. It is the reference, and
        training uses it.
        """
        return weighted_experts(x, routing, self.gate_proj, self.up_proj, self.down_proj)


def weighted_experts(x: Tensor, routing: Routing, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Return the weighted sum of each token's SwiGLU experts, x [T, d] -> [T, d].

    gate, up: [E, I, d]; down: [E, d, I]. On a CPU, raises DSparkError if routing names other
    experts.
    """
    top = routing.experts.shape[-1]
    plan = permute_tokens(routing.experts, len(gate))
    parts = x[plan.order // top].split(plan.counts.tolist())
    outs = [
        linear(silu(linear(part, own_gate)) * linear(part, own_up), own_down)
        for part, own_gate, own_up, own_down in zip(parts, gate, up, down, strict=True)
    ]
    out = torch.cat(outs)[plan.back].unflatten(0, (-1, top))  # [T, k, d]
    return (out * routing.weights[..., None].to(out.dtype)).sum(-2)


class SharedExperts(nn.Module):
    """The experts that every token goes through, as one SwiGLU of their joint width."""

    def __init__(self, width: int, inner: int):
        """Make the layers. width: d; inner: the joint width."""
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [T, d] to [T, d]."""
        return self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))


class MoE(nn.Module):
    """Routed and shared experts in place of a layer's MLP."""

    def __init__(self, c: DrafterConfig):
        super().__init__()
        self.gate = Router(c)
        inner, width = c.moe_intermediate_size, c.hidden_size
        self.experts = Experts(c.num_experts, inner, width)
        self.shared_experts = None
        if c.num_shared_experts:
            self.shared_experts = SharedExperts(width, c.num_shared_experts * inner)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., d] to [..., d]; no tokens give no rows."""
        flat = x.reshape(-1, x.shape[-1])
        if not len(flat):
            return torch.zeros_like(x)
        out = self.experts(flat, self.gate(flat))
        if self.shared_experts is not None:
            out = out + self.shared_experts(flat)
        return out.view(*x.shape[:-1], -1)


def _stacked(experts: int, rows: int, columns: int) -> nn.Parameter:
    """Draw weights [E, N, K] as nn.Linear does."""
    bound = 1 / math.sqrt(columns)
    return nn.Parameter(torch.empty(experts, rows, columns).uniform_(-bound, bound))


@torch.no_grad()
def balance_experts(
    module: nn.Module, rate: float = 1e-3, total: Callable[[Tensor], Tensor] | None = None
) -> list[float]:
    """Move the biases of all routers in `module` by `rate` towards equal loads; reset the loads.

    Experts above the mean load since the last call get a lower bias, those below a higher one (Wang
    et al., 2024). Call it once per optimiser step. total: sums a router's loads [E] int64 over
    processes. Returns the largest load over the mean one, for each router that saw tokens: 1 is
    perfect balance, E/k is collapse.
    """
    peaks = []
    for router in (m for m in module.modules() if isinstance(m, Router)):
        load = (router.load if total is None else total(router.load)).float()
        if not load.any():
            continue
        peaks.append(float(load.max() / load.mean()))
        router.e_score_correction_bias.add_(torch.sign(load.mean() - load), alpha=rate)
        router.load.zero_()
    return peaks
