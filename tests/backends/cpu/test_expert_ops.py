"""Compiled experts, streams and windows against the modules that define them."""

from __future__ import annotations

import pytest
import torch

from sglang_dspark.backends.cpu import expert_ops, linear, paged_attention
from sglang_dspark.backends.cpu.attention_plan import make_plan, narrowed
from sglang_dspark.backends.cpu.expert_ops import CompiledShared, CompiledStreams, fast_path
from sglang_dspark.drafter.attention import block_attention
from sglang_dspark.drafter.hyper_connections import (
    HyperConnection,
    StreamRead,
    doubly_stochastic,
)
from sglang_dspark.drafter.moe import MoE
from tests.backends.cpu.operator_levels import LEVELS, force_level
from tests.drafter.helpers import tiny_config

SIZES = {
    "hidden_size": 64,
    "num_experts": 8,
    "experts_per_token": 2,
    "moe_intermediate_size": 32,
    "num_shared_experts": 1,
    "routed_scaling": 2.0,
}


def moe(**changes: object) -> MoE:
    torch.manual_seed(0)
    made = MoE(tiny_config(**{**SIZES, **changes})).eval()
    with torch.no_grad():
        made.gate.e_score_correction_bias.normal_(std=0.1)
    return made


def routed(module: MoE) -> expert_ops.CompiledExperts:
    e = module.experts
    return expert_ops.CompiledExperts(e.gate_proj, e.up_proj, e.down_proj)


@pytest.mark.parametrize("rows", [1, 5, 40, 200])
@torch.no_grad()
def test_experts_are_the_modules(rows: int) -> None:
    module = moe(num_shared_experts=0)
    x = torch.randn(rows, 64)
    routing = module.gate(x)
    found = routed(module)(x, routing.experts, routing.weights)
    torch.testing.assert_close(found, module(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("shared", [1, 2])
@torch.no_grad()
def test_shared_experts_are_the_modules(shared: int) -> None:
    module = moe(num_shared_experts=shared).shared_experts
    compiled = fast_path(CompiledShared, module)
    assert compiled is not None
    assert module is not None
    x = torch.randn(5, 64)
    torch.testing.assert_close(compiled(x), module(x), atol=1e-5, rtol=1e-4)
    assert fast_path(CompiledShared, None) is None
    assert fast_path(CompiledShared, moe(moe_intermediate_size=24).shared_experts) is None
    assert fast_path(CompiledShared, moe().bfloat16().shared_experts) is None


@torch.no_grad()
def test_a_token_has_the_same_bits_alone_and_among_others() -> None:
    module = moe()
    compiled = routed(module)
    x = torch.randn(30, 64)
    routing = module.gate(x)
    together = compiled(x, routing.experts, routing.weights)
    for t in range(30):
        own = routing.experts[t : t + 1], routing.weights[t : t + 1]
        assert torch.equal(compiled(x[t : t + 1], *own)[0], together[t])


@torch.no_grad()
def test_everyone_may_choose_one_expert() -> None:
    module = moe(experts_per_token=1, num_shared_experts=0)
    module.gate.e_score_correction_bias[3] = 100.0
    x = torch.randn(7, 64)
    routing = module.gate(x)
    found = routed(module)(x, routing.experts, routing.weights)
    torch.testing.assert_close(found, module(x), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_rows_that_do_not_fit_are_refused() -> None:
    module = moe()
    x = torch.randn(3, 64)
    routing = module.gate(x)
    with pytest.raises(RuntimeError, match="are not for the compiled experts"):
        routed(module)(x.double(), routing.experts, routing.weights)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0, 1e3])
@pytest.mark.parametrize("n", [2, 4, 7])
@torch.no_grad()
def test_mixing_is_the_modules(
    n: int, scale: float, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams that are the unit vectors, and a block of zeros: the result is the mixing."""
    force_level(monkeypatch, expert_ops, level)
    logits = torch.randn(20, n, n, generator=torch.Generator().manual_seed(n)) * scale
    compiled = CompiledStreams(HyperConnection(n, n))
    compiled.alphas.fill_(1.0)
    compiled.mix_bias.zero_()
    projected = torch.cat([torch.zeros(20, 2 * n), logits.flatten(1)], 1)
    found = compiled.write(torch.eye(n).expand(20, n, n), torch.zeros(20, n), projected)
    assert (found.sum(1) - 1).abs().max() < 1e-5
    assert (found.sum(2) - 1).abs().max() < 1e-5
    torch.testing.assert_close(found, doubly_stochastic(logits), atol=1e-4, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("n", [2, 3, 4, 5])  # as many rows of phi that make no four
def test_streams_are_the_modules(n: int, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    force_level(monkeypatch, expert_ops, level)
    torch.manual_seed(0)
    connection, last, block = HyperConnection(n, 64), StreamRead(n, 64), torch.nn.Linear(64, 64)
    for parameter in [*connection.parameters(), *last.parameters()]:
        parameter.add_(torch.randn_like(parameter) * 0.5)
    x = torch.randn(9, n, 64)
    compiled = CompiledStreams(connection)
    read, kept = compiled.read(x)
    found = compiled.write(x, block(read), kept)
    torch.testing.assert_close(found, connection(x, block), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(expert_ops.CompiledRead(last)(x)[0], last(x), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_every_instruction_set_computes_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    module, connection = moe(), HyperConnection(5, 48)
    x, streams = torch.randn(13, 64), torch.randn(13, 5, 48)
    routing, found = module.gate(x), []
    for level in LEVELS:
        force_level(monkeypatch, expert_ops, level)
        shared = fast_path(CompiledShared, module.shared_experts)
        assert shared is not None
        own = CompiledStreams(connection)
        read, projected = own.read(streams)
        experts = routed(module)(x, routing.experts, routing.weights)
        found.append([experts, shared(x), read, projected, own.write(streams, read, projected)])
    for each in found:
        assert all(map(torch.equal, each, found[0]))


def test_without_operators_the_modules_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fast_path(CompiledStreams, HyperConnection(2, 64)) is not None
    assert fast_path(CompiledStreams, HyperConnection(2, 60)) is None  # no whole vectors
    assert fast_path(CompiledStreams, HyperConnection(1, 64)) is None
    monkeypatch.setattr(linear, "prepare", lambda: None)
    assert fast_path(CompiledStreams, HyperConnection(2, 64)) is None
    assert fast_path(expert_ops.CompiledRead, StreamRead(2, 64)) is None


@pytest.mark.parametrize("window", [1, 4, 9, 128])
def test_a_narrowed_plan_is_the_drafters_window(window: int) -> None:
    """Three requests of other lengths; each row of a block sees the same context."""
    torch.manual_seed(0)
    gamma, lens = 4, [0, 6, 11]
    k_cache, v_cache = torch.randn(80, 2, 8), torch.randn(80, 2, 8)
    table = torch.randperm(80)[:60].view(3, 20).int()
    q = torch.randn(3 * gamma, 4, 8)
    plan = make_plan(table, torch.arange(3), [gamma] * 3, [n + gamma for n in lens])
    plan = narrowed(plan, window)
    out = torch.empty_like(q)
    paged_attention.paged_attention(
        q, k_cache, v_cache, plan, scale=8**-0.5, causal=False, window=paged_attention.NO_WINDOW,
        threads=1, out=out,
    )  # fmt: skip
    for r, length in enumerate(lens):
        slots = table[r].long()
        own = slots[length : length + gamma]
        expected = block_attention(
            q[None, None, r * gamma : (r + 1) * gamma],
            k_cache[own][None, None],
            v_cache[own][None, None],
            (k_cache[slots[:length]][None], v_cache[slots[:length]][None]),
            torch.tensor([[length]]),
            window=window,
        )
        torch.testing.assert_close(
            out[r * gamma : (r + 1) * gamma], expected[0, 0], atol=1e-5, rtol=1e-4
        )
