"""The attention backend against one dense row at a time, in every mode SGLang calls it in."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from sglang_dspark.backends.cpu import paged_attention
from sglang_dspark.backends.cpu.attention import (
    DsparkCpuAttnBackend,
    DsparkCpuMultiStepDraftBackend,
)
from sglang_dspark.backends.cpu.attention_plan import make_plan
from sglang_dspark.errors import DSparkError
from tests.backends.cpu.attention_world import (
    Case,
    World,
    decode_pass,
    extend_pass,
    ragged_pass,
    verify_pass,
)

TOGETHER = 32  # queries of a block: kTogether of attention.cpp
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}


def assert_matches(world: World, out: Tensor) -> None:
    expected = world.expected()
    assert out.shape == expected.shape
    assert out.dtype == world.case.dtype
    assert (out.double() - expected).abs().max().item() <= TOLERANCE[world.case.dtype]


def check(case: Case, make_pass: object) -> None:
    world = World(case)
    out = world.forward(DsparkCpuAttnBackend(world.runner()), make_pass(world))  # type: ignore[operator]
    assert_matches(world, out)


SHAPES = [(1, 1), (3, 1), (9, 3), (4, 4), (5, 1), (8, 2)]  # query heads, KV heads


@st.composite
def cases(draw: st.DrawFn, *, uniform: bool, longest: int, shortest: int = 1) -> Case:
    requests = draw(st.integers(1, 5))
    lengths = st.integers(shortest, longest)
    first = draw(lengths)
    window = (
        [first] * requests if uniform else [first, *(draw(lengths) for _ in range(requests - 1))]
    )
    heads, kv_heads = draw(st.sampled_from(SHAPES))
    return Case(
        prefix=tuple(draw(st.integers(0, 150)) for _ in window),
        window=tuple(window),
        heads=heads,
        kv_heads=kv_heads,
        dim=draw(st.sampled_from([8, 16, 20, 64])),
        value_dim=draw(st.sampled_from([8, 12, 64])),
        sliding=draw(st.sampled_from([-1, -1, 1, 5, 64, 500])),
        shuffled=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=40, deadline=None)
@given(case=cases(uniform=True, longest=1))
def test_decode(case: Case) -> None:
    check(case, decode_pass)


@settings(max_examples=40, deadline=None)
@given(case=cases(uniform=True, longest=8))
def test_verify_uniform(case: Case) -> None:
    check(case, verify_pass)


@settings(max_examples=40, deadline=None)
@given(case=cases(uniform=False, longest=8))
def test_verify_ragged(case: Case) -> None:
    check(case, ragged_pass)


@settings(max_examples=40, deadline=None)
@given(case=cases(uniform=True, longest=8))
def test_draft_block_sees_itself_both_ways(case: Case) -> None:
    check(replace(case, bidirectional=True), verify_pass)


@pytest.mark.parametrize("sliding", [-1, 20])
def test_a_long_block_sees_itself_both_ways(sliding: int) -> None:
    window = (2 * TOGETHER + 5,) * 2
    case = Case((70, 3), window, heads=6, kv_heads=2, bidirectional=True, sliding=sliding)
    check(case, verify_pass)


@settings(max_examples=40, deadline=None)
@given(case=cases(uniform=False, longest=90))
def test_extend(case: Case) -> None:
    check(case, extend_pass)


@settings(max_examples=20, deadline=None)
@given(case=cases(uniform=True, longest=4, shortest=2))
def test_draft_extend(case: Case) -> None:
    check(case, lambda world: extend_pass(world, ForwardMode.DRAFT_EXTEND_V2))


@pytest.mark.parametrize("window", [1, 5, 40])
@pytest.mark.parametrize("shuffled", [False, True])
def test_half_precision_cache(window: int, shuffled: bool) -> None:
    case = Case((70, 3), (window, window), heads=6, kv_heads=2, shuffled=shuffled)
    check(replace(case, dtype=torch.bfloat16), verify_pass)


@pytest.mark.parametrize("window", [1, 5, 40])
@pytest.mark.parametrize("sliding", [-1, 20])
def test_logit_cap(window: int, sliding: int) -> None:
    case = Case((70, 0), (window, window), heads=6, kv_heads=2, sliding=sliding, logit_cap=0.5)
    check(case, verify_pass)


def test_long_context() -> None:
    case = Case((2000, 700, 1311), (6, 6, 6), heads=9, kv_heads=3, dim=64, value_dim=64)
    check(case, verify_pass)


def test_large_scores_do_not_overflow() -> None:
    world = World(Case((200,), (6,)))
    world.queries *= 300.0
    out = world.forward(DsparkCpuAttnBackend(world.runner()), verify_pass(world))
    assert (out.double() - world.expected()).abs().max().item() <= 1e-4


def test_query_rows_may_be_strided() -> None:
    """q, k and v arrive as slices of one projection's output."""
    world = World(Case((33, 5), (4, 4), heads=6, kv_heads=2))
    plain = world.queries
    k, v = world.new_rows(world.keys).flatten(1), world.new_rows(world.values).flatten(1)
    joined = torch.cat([plain, k, v], dim=1)
    q, k, v = joined.split([plain.shape[1], k.shape[1], v.shape[1]], dim=1)
    backend, batch = DsparkCpuAttnBackend(world.runner()), verify_pass(world)
    backend.init_forward_metadata(batch)
    out = backend.forward(q, k.view(-1, 2, 16), v.view(-1, 2, 16), world.layer(), batch)
    assert_matches(world, out)


def test_written_rows_land_in_their_slots() -> None:
    world = World(Case((11, 4), (3, 6), heads=2, kv_heads=2))
    before = world.kv_pool.k_buffer[0].clone()
    world.forward(DsparkCpuAttnBackend(world.runner()), ragged_pass(world))
    slots = world.new_rows(world.slots)
    assert torch.equal(world.kv_pool.k_buffer[0][slots], world.new_rows(world.keys))
    assert torch.equal(world.kv_pool.v_buffer[0][slots], world.new_rows(world.values))
    before[slots] = world.new_rows(world.keys)
    assert torch.equal(before.nan_to_num(7.0), world.kv_pool.k_buffer[0].nan_to_num(7.0))


def test_layer_without_keys_reads_only() -> None:
    """Layers that share another layer's cache pass k = v = None; save_kv_cache=False likewise."""
    world = World(Case((20,), (5,)))
    backend, batch = DsparkCpuAttnBackend(world.runner()), verify_pass(world)
    world.forward(backend, batch)
    filled = world.kv_pool.k_buffer[0].clone()
    out = backend.forward(world.queries, None, None, world.layer(), batch)
    assert_matches(world, out)
    k, v = world.new_rows(world.keys), world.new_rows(world.values)
    out = backend.forward(world.queries, 0 * k, 0 * v, world.layer(), batch, save_kv_cache=False)
    assert_matches(world, out)
    assert torch.equal(filled.nan_to_num(7.0), world.kv_pool.k_buffer[0].nan_to_num(7.0))


def test_requests_share_a_prefix() -> None:
    """Radix cache: two requests read the same slots."""
    world = World(Case((50, 50), (6, 6), heads=6, kv_heads=2))
    world.keys[1][:50], world.values[1][:50] = world.keys[0][:50], world.values[0][:50]
    world.slots[1] = torch.cat([world.slots[0][:50], world.slots[1][50:]])
    world._fill()
    out = world.forward(DsparkCpuAttnBackend(world.runner()), verify_pass(world))
    assert_matches(world, out)


def test_idle_pass() -> None:
    world = World(Case((4,), (1,)))
    batch = decode_pass(world)
    batch.forward_mode = ForwardMode.IDLE
    batch.seq_lens = batch.seq_lens[:0]
    batch.req_pool_indices = batch.req_pool_indices[:0]
    backend = DsparkCpuAttnBackend(world.runner())
    backend.init_forward_metadata(batch)
    out = backend.forward(world.queries[:0], None, None, world.layer(), batch)
    assert out.shape == (0, 3 * 16)


def test_draft_steps() -> None:
    """EAGLE's drafting after its first token: step s sees the prefix and s + 1 drafts."""
    steps, prefix = 4, (9, 0, 30)
    world = World(Case(prefix, (steps,) * 3, heads=6, kv_heads=2))
    container = DsparkCpuMultiStepDraftBackend(world.runner(), steps)
    assert len(container.attn_backends) == steps - 1
    batch = verify_pass(world)
    batch.forward_mode = ForwardMode.DECODE
    container.init_forward_metadata(batch)
    for step, backend in enumerate(container.attn_backends):
        last = [[p + step] for p in prefix]
        slots, k, v = (
            torch.cat([each[at] for each, at in zip(rows, last, strict=True)])
            for rows in (world.slots, world.keys, world.values)
        )
        batch.out_cache_loc = slots
        queries = world.queries[: len(prefix)]
        out = backend.forward(queries, k, v, world.layer(), batch)
        for r, p in enumerate(prefix):
            alone = World(Case((p + step,), (1,), heads=6, kv_heads=2))
            seen = slice(0, p + step + 1)
            alone.keys, alone.values = [world.keys[r][seen]], [world.values[r][seen]]
            alone.queries = queries[r : r + 1]
            assert_matches(alone, out[r : r + 1])


def test_one_draft_step_needs_no_backend() -> None:
    world = World(Case((4,), (1,)))
    assert DsparkCpuMultiStepDraftBackend(world.runner(), 1).attn_backends == []


@settings(max_examples=40, deadline=None)
@given(case=cases(uniform=True, longest=8))
def test_plain_decode_and_verify_agree_to_the_last_bit(case: Case) -> None:
    """Row i of a verify window is what a decode step at that position returns."""
    window = World(case)
    together = window.forward(DsparkCpuAttnBackend(window.runner()), verify_pass(window))
    width = case.window[0]
    for i in range(width):
        step = World(case)
        prefix = tuple(p + i for p in case.prefix)
        step.case = replace(case, prefix=prefix, window=(1,) * len(prefix))
        lens = step.case.lens
        step.keys = [k[:n] for k, n in zip(window.keys, lens, strict=True)]
        step.values = [v[:n] for v, n in zip(window.values, lens, strict=True)]
        step.slots = [s[:n] for s, n in zip(window.slots, lens, strict=True)]
        step.queries = window.queries[i::width]
        step._fill()
        alone = step.forward(DsparkCpuAttnBackend(step.runner()), decode_pass(step))
        assert torch.equal(alone, together[i::width])


def test_neighbours_do_not_change_a_request() -> None:
    """Not even a neighbour whose window is taken in several blocks."""
    case = Case((40, 3, 90), (6, 2 * TOGETHER + 1, 2), heads=6, kv_heads=2)
    batch = World(case)
    out = batch.forward(DsparkCpuAttnBackend(batch.runner()), extend_pass(batch))
    first = 0
    for r, count in enumerate(case.window):
        alone = World(replace(case, prefix=case.prefix[r : r + 1], window=(count,)))
        alone.keys, alone.values = [batch.keys[r]], [batch.values[r]]
        alone.queries = batch.queries[first : first + count]
        alone._fill()
        single = alone.forward(DsparkCpuAttnBackend(alone.runner()), extend_pass(alone))
        assert torch.equal(single, out[first : first + count])
        first += count


def test_a_cached_part_does_not_change_the_rest() -> None:
    """A prompt read at once, or with its first 45 tokens in the cache."""
    case = Case((0,), (90,), heads=6, kv_heads=2)
    whole = World(case)
    out = whole.forward(DsparkCpuAttnBackend(whole.runner()), extend_pass(whole))
    rest = World(replace(case, prefix=(45,), window=(45,)))
    rest.keys, rest.values, rest.queries = whole.keys, whole.values, whole.queries[45:]
    rest._fill()
    later = rest.forward(DsparkCpuAttnBackend(rest.runner()), extend_pass(rest))
    assert torch.equal(later, out[45:])


def test_threads_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long enough contexts for three threads; a step of few tokens is one thread's work."""
    case = Case((400, 3, 900), (6, 70, 6), heads=6, kv_heads=2)
    results = []
    for count in ("1", "2", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", count)
        world = World(case)
        backend = DsparkCpuAttnBackend(world.runner())
        assert backend.threads == int(count)
        results.append(world.forward(backend, extend_pass(world)))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("cached", "threads"), [((60,), 1), ((120,), 1), ((900,), 4), ((128, 127), 3), ((6,) * 9, 1)]
)
def test_a_few_tokens_are_one_threads_work(cached: tuple[int, ...], threads: int) -> None:
    """One query each, eight heads of 64: a context of 64 tokens is a thread's work."""
    table = torch.zeros(1, 900, dtype=torch.int32)
    plan = make_plan(table, torch.zeros(len(cached)), (1,) * len(cached), cached)
    assert paged_attention.threads_for(4, plan, 8, 2 * 64) == threads


def test_padding_tokens_return_zeros() -> None:
    world = World(Case((20, 7), (3, 1)))
    backend, batch = DsparkCpuAttnBackend(world.runner()), ragged_pass(world)
    backend.init_forward_metadata(batch)
    pad = torch.zeros(2, dtype=torch.int64)
    batch.out_cache_loc = torch.cat([batch.out_cache_loc, pad])
    k, v = (
        torch.cat([world.new_rows(x), torch.ones(2, 1, 16)]) for x in (world.keys, world.values)
    )
    queries = torch.cat([world.queries, torch.ones(2, 48)])
    out = backend.forward(queries, k, v, world.layer(), batch)
    assert_matches(world, out[:-2])
    assert torch.equal(out[-2:], torch.zeros(2, 48))


def test_what_is_not_served_is_refused() -> None:
    world = World(Case((4,), (1,)))
    latent = world.runner()
    latent.use_mla_backend = True
    with pytest.raises(DSparkError, match="MLA"):
        DsparkCpuAttnBackend(latent)
    backend, batch, layer = DsparkCpuAttnBackend(world.runner()), decode_pass(world), world.layer()
    backend.init_forward_metadata(batch)
    with pytest.raises(DSparkError, match="sinks"):
        backend.forward(world.queries, None, None, layer, batch, sinks=torch.zeros(3))
    layer.is_cross_attention = True
    with pytest.raises(DSparkError, match="cross attention"):
        backend.forward(world.queries, None, None, layer, batch)
