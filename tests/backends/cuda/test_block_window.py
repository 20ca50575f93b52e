"""A draft block's window where our CPU backend does not attend: the drafter's own, capturable."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from sglang_dspark.backends.moe.block_window import (
    BlockWindow,
    WindowedAttention,
    attend,
    context_of,
)
from sglang_dspark.drafter.attention import block_attention
from sglang_dspark.drafter.hyper_connections import HyperConnection, StreamRead
from sglang_dspark.drafter.moe import Router
from sglang_dspark.errors import DSparkError
from tests.backends.cpu.attention_world import Case, World, verify_pass
from tests.drafter.helpers import tiny_config

GAMMA = 4
CASE = Case((0, 6, 11), (GAMMA,) * 3, heads=4, kv_heads=2, dim=16, bidirectional=True)


class Silent:
    """A backend of a GPU's kind: it holds the pools, and must not be asked to attend."""

    def __init__(self, world: World):
        self.req_to_token_pool, self.token_to_kv_pool = world.req_pool, world.kv_pool


def whole_attention() -> RadixAttention:
    return RadixAttention(
        CASE.heads, CASE.dim, CASE.dim**-0.5, CASE.kv_heads, 0, attn_type=AttentionType.ENCODER_ONLY
    )


def windowed_pass(world: World, tokens: int, causal: bool = False, **pool: Any) -> Tensor:
    """One layer over the world's draft blocks."""
    window = BlockWindow(tokens)
    layer = WindowedAttention(whole_attention(), window, causal)
    batch = verify_pass(world)
    k, v = (world.new_rows(rows).flatten(1) for rows in (world.keys, world.values))
    for name, value in pool.items():
        setattr(world.kv_pool, name, value)
    with forward_context(ForwardContext(attn_backend=Silent(world))), window.over(batch):
        return layer(world.queries, k, v, batch)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, 9, 128])
def test_the_window_is_the_drafters(tokens: int, causal: bool) -> None:
    """Contexts of none, less and more than the window; what no request wrote is NaN."""
    world = World(CASE)
    found = windowed_pass(world, tokens, causal).view(-1, CASE.heads, CASE.dim)
    queries = world.queries.view(-1, CASE.heads, CASE.dim)
    for r, length in enumerate(CASE.prefix):
        block = slice(r * GAMMA, (r + 1) * GAMMA)
        keys, values = world.keys[r], world.values[r]
        expected = block_attention(
            queries[block][None, None],
            keys[length:][None, None],
            values[length:][None, None],
            (keys[:length][None], values[:length][None]),
            torch.tensor([[length]]),
            window=tokens,
            causal=causal,
        )
        torch.testing.assert_close(found[block], expected[0, 0], atol=1e-5, rtol=1e-4)


def test_an_empty_slot_of_a_graph_disturbs_no_other() -> None:
    """Its row and length are the fill values; its output is unused, but finite."""
    world = World(CASE)
    alone = windowed_pass(world, 9)
    table, cache = (
        world.req_pool.req_to_token,
        (world.kv_pool.k_buffer[0], world.kv_pool.v_buffer[0]),
    )
    rows = torch.cat([world.rows, torch.zeros(1, dtype=world.rows.dtype)])
    lens = torch.tensor([*CASE.prefix, 1])
    q, k, v = (torch.randn((3 + 1) * GAMMA, n, CASE.dim) for n in (4, 2, 2))
    q[: 3 * GAMMA] = world.queries.view(-1, 4, CASE.dim)
    k[: 3 * GAMMA], v[: 3 * GAMMA] = world.new_rows(world.keys), world.new_rows(world.values)
    cache[0][0], cache[1][0] = 0.0, 0.0  # the slot that padding writes to
    found = attend(q, k, v, cache, context_of(table, rows, lens, 9), CASE.dim**-0.5)
    torch.testing.assert_close(found[: 3 * GAMMA], alone, atol=1e-6, rtol=1e-5)
    assert found.isfinite().all()


def test_what_a_graph_holds_reads_no_value_on_the_host() -> None:
    """A fake tensor has no values, and a shape that depends on one is refused."""
    c = tiny_config(num_experts=4, experts_per_token=2, moe_intermediate_size=32, hidden_size=64)
    with FakeTensorMode(), torch.no_grad():
        context = context_of(
            torch.empty(8, 40).int(), torch.empty(3).long(), torch.empty(3).long(), 9
        )
        q, k = torch.empty(12, 4, 16), torch.empty(12, 2, 16)
        assert attend(q, k, k, (torch.empty(80, 2, 16),) * 2, context, 0.25).shape == (12, 64)
        routing = Router(c).eval()(torch.empty(12, 64))
        assert routing.experts.shape == (12, 2)
        streams = HyperConnection(4, 64)(torch.empty(12, 4, 64), lambda x: x)
        assert StreamRead(4, 64)(streams).shape == (12, 64)


def test_a_cache_of_another_layout_is_refused() -> None:
    with pytest.raises(DSparkError, match="not from the layout hnd; unset SGLANG_USE_HND_KVCACHE"):
        windowed_pass(World(CASE), 9, kv_cache_layout="hnd")


def test_no_window_is_the_backends_business() -> None:
    window = BlockWindow(None)
    with window.over(SimpleNamespace()):
        assert window.context is None
