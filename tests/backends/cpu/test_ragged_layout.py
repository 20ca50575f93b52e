"""Packed rows of a ragged verify pass: which they are, and what they accept, against the room's
own accept rules over whole windows."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_dspark.backends.cpu import greedy_ops
from sglang_dspark.backends.cpu.accept import accept
from sglang_dspark.backends.cpu.greedy_ops import accept_greedy, committed
from sglang_dspark.backends.cpu.ragged_layout import (
    PackedRows,
    layout_of,
    packed_window,
    rows_in,
    rows_of,
)
from sglang_dspark.verify.greedy import accept_greedy as reference
from tests.backends.cpu.operator_levels import LEVELS, force_level

GAMMA, VOCAB = 5, 97


def packed(lengths: list[int]) -> PackedRows:
    return rows_in(layout_of(tuple(lengths)), GAMMA + 1)


def test_layout_is_upstreams_own() -> None:
    from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

    ours = layout_of((0, 3, 5, 1))
    theirs = RaggedVerifyLayout.from_verify_lens(
        verify_lens_cpu=[1, 4, 6, 2], device=torch.device("cpu"), grid=[13]
    )
    for name in ("verify_lens", "extend_start_loc", "qo_indptr_device"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert ours.verify_lens_cpu == theirs.verify_lens_cpu
    assert ours.graph_num_tokens == theirs.graph_num_tokens == 13


def test_window_is_upstreams_own() -> None:
    from sglang.kernels.ops.speculative.dspark.dspark_verify_window import compact_verify_ids

    lengths = [2, 0, 5, 1]
    ids = torch.arange(100, 100 + 4 * GAMMA).view(4, GAMMA)
    drafts = torch.arange(4 * GAMMA).view(4, GAMMA)
    places = torch.arange(4 * (GAMMA + 1))
    verify_window = SimpleNamespace(
        positions_2d=places.view(4, -1) + 1000, verify_cache_loc=places + 2000
    )
    window = packed_window(packed(lengths), torch.cat([ids[:, :1], drafts], dim=1), verify_window)
    expected = compact_verify_ids(
        draft_block_ids=ids,
        draft_tokens=drafts,
        layout=layout_of(tuple(lengths)),
        device="cpu",
    )
    assert torch.equal(window.verify_ids, expected)
    assert window.window_index.tolist() == [0, 1, 2, 6, 12, 13, 14, 15, 16, 17, 18, 19]
    assert torch.equal(window.positions, window.window_index + 1000)
    assert torch.equal(window.verify_cache_loc, window.window_index + 2000)


def test_equal_lengths_share_one_layout() -> None:
    first, again = (layout_of((2, 0, 5)) for _ in range(2))
    assert first is again
    assert rows_in(first, GAMMA + 1) is rows_in(again, GAMMA + 1)
    assert layout_of((2, 5, 0)) is not first
    assert rows_in(first, GAMMA + 1) is not rows_in(first, GAMMA)


def test_a_step_without_drafts_is_one_row_a_request() -> None:
    layout = layout_of((0,) * 3)
    rows = rows_in(layout, GAMMA + 1)
    ids, places = torch.zeros(3, GAMMA + 1, dtype=torch.int64), torch.arange(3 * (GAMMA + 1))
    ids[:, 0] = torch.tensor([7, 8, 9])
    slots = SimpleNamespace(positions_2d=places.view(3, -1), verify_cache_loc=places)
    window = packed_window(rows, ids, slots)
    assert window.verify_ids.tolist() == [7, 8, 9]
    assert window.positions.tolist() == window.window_index.tolist() == [0, 6, 12]
    assert rows.starts.tolist() == [0, 1, 2]
    ids[0, 0] = 0  # the block's buffer is written again in the next step
    assert window.verify_ids.tolist() == [7, 8, 9]


def test_rows_of_counts_from_each_start() -> None:
    starts = PackedRows((3, 1, 2), GAMMA + 1).starts
    assert starts.tolist() == [0, 3, 4]
    kept = rows_of(starts, torch.tensor([1, 1, 2], dtype=torch.int32), 4)
    assert kept.tolist() == [0, 3, 4, 5]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("level", [*LEVELS, None])
def test_greedy_accept_is_the_rule_of_verify(
    seed: int, spread: bool, level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_level(monkeypatch, greedy_ops, level)
    generator = torch.Generator().manual_seed(seed)
    requests = 6
    lens = torch.randint(0, GAMMA + 1, (requests,), generator=generator) + 1
    window = torch.randint(0, 3, (requests, GAMMA + 1), generator=generator)
    whole = torch.randn(requests, GAMMA + 1, VOCAB, generator=generator)
    whole[..., :3] += 3.0  # so that drafts are often right
    rows = packed((lens - 1).tolist())
    flat = whole.view(-1, VOCAB)
    logits, starts = (flat, rows.strided) if spread else (flat[rows.index], rows.starts)
    accepted, bonus = accept_greedy(window, lens, starts, logits.contiguous())
    expected = reference(window[:, 1:], whole.argmax(-1), verify_lens=lens - 1)
    assert accepted.tolist() == expected.accepted.tolist()
    assert bonus.tolist() == expected.bonus.tolist()


def sampling(temperatures: list[float], top_k: int = 1 << 30, top_p: float = 1.0):
    """Build the `SamplingBatchInfo` fields that the accept rule reads."""
    greedy = [t == 0 for t in temperatures]
    temperature = torch.tensor([t or 1.0 for t in temperatures])[:, None]
    return SimpleNamespace(
        is_all_greedy=all(greedy),
        is_any_greedy=any(greedy),
        temperatures=temperature,
        top_ks=torch.tensor([1 if g else top_k for g in greedy], dtype=torch.int32),
        top_ps=torch.full((len(greedy),), top_p),
        min_ps=torch.zeros(len(greedy)),
        sampling_seed=None,
    )


def distance(drawn: torch.Tensor, distribution: torch.Tensor) -> float:
    """Chi-square over 8 tokens; with 7 degrees of freedom 33 has p = 3e-5, 80 less than 1e-13."""
    expected = distribution.double() * len(drawn)
    seen = torch.bincount(drawn, minlength=len(distribution)).double()
    return float(((seen - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("one_hot", [False, True])
def test_sampled_tokens_follow_the_target_at_every_length(length: int, one_hot: bool) -> None:
    """First emitted token of 20,000 requests; what lies behind the verified rows is garbage."""
    torch.manual_seed(length)
    requests, vocab, depth = 20_000, 8, 2
    row = torch.randn(depth + 1, vocab)
    logits = row[: length + 1].repeat(requests, 1)
    distribution = torch.randn(depth, vocab)
    drafts = torch.multinomial(distribution.softmax(-1), requests, replacement=True).T
    if one_hot:
        drafts = torch.full((requests, depth), 3)
    window = torch.cat([torch.zeros(requests, 1), drafts, torch.full((requests, 3), 7)], 1).long()
    block = SimpleNamespace(
        greedy_draft=one_hot,
        temperatures=torch.ones(requests),
        corrected_logits=None if one_hot else distribution.expand(requests, depth, vocab),
        greedy_mask=torch.zeros(requests, dtype=torch.bool),
    )
    lens = torch.full((requests,), length + 1)
    starts = torch.arange(requests) * (length + 1)
    accepted, bonus = accept(window, lens, starts, logits, block, sampling([0.8] * requests), lens)
    assert int(accepted.max()) <= length
    first = torch.where(accepted > 0, window[:, 1], bonus)
    target_probs = (row[0] / 0.8).softmax(-1)
    assert distance(first, target_probs) < 33
    if length:
        assert int((accepted > 0).sum()) > 0
        if not one_hot:  # the bonus alone follows another distribution
            assert distance(bonus, target_probs) > 80


def test_greedy_and_sampled_requests_in_one_batch() -> None:
    torch.manual_seed(0)
    window = torch.tensor([[0, 4, 4, 4, 4, 4], [0, 4, 4, 4, 4, 4]])
    lens, starts = torch.tensor([2, 1]), torch.tensor([0, 2])
    logits = torch.randn(3, VOCAB)
    logits[0, 4] = 50.0
    block = SimpleNamespace(
        greedy_draft=True,
        temperatures=torch.ones(2),
        corrected_logits=None,
        greedy_mask=torch.tensor([True, False]),
    )
    accepted, bonus = accept(window, lens, starts, logits, block, sampling([0.0, 1.0]), lens)
    assert accepted.tolist() == [1, 0]
    assert int(bonus[0]) == int(logits[1].argmax())


@pytest.mark.parametrize("spread", [False, True])
def test_sampled_requests_read_their_own_rows(spread: bool) -> None:
    """With top-k 1 sampling is greedy for windows of any lengths."""
    generator = torch.Generator().manual_seed(4)
    lens = torch.tensor([1, 4, 2, 6, 3])
    whole = torch.randn(5, GAMMA + 1, VOCAB, generator=generator)
    window = torch.zeros(5, GAMMA + 1, dtype=torch.int64)
    window[:, 1:] = whole[:, :-1].argmax(-1)
    window[3, 4] += 1  # one wrong draft; the others are right
    rows, flat = packed((lens - 1).tolist()), whole.view(-1, VOCAB)
    logits, starts = (flat, rows.strided) if spread else (flat[rows.index], rows.starts)
    block = SimpleNamespace(
        greedy_draft=True,
        temperatures=torch.ones(5),
        corrected_logits=None,
        greedy_mask=torch.zeros(5, dtype=torch.bool),
    )
    found = accept(window, lens, starts, logits, block, sampling([1.0] * 5, top_k=1), lens)
    expected = accept_greedy(window, lens, starts, logits.contiguous())
    assert [each.tolist() for each in found] == [each.tolist() for each in expected]
    assert found[0].tolist() == [0, 3, 1, 3, 2]


def test_top_k_of_each_request_holds_for_all_its_rows() -> None:
    torch.manual_seed(1)
    requests = 64
    lens = torch.full((requests,), 2)
    logits = torch.randn(2 * requests, VOCAB)
    window = torch.zeros(requests, GAMMA + 1, dtype=torch.int64)
    window[:, 1] = logits[::2].argmax(-1)
    block = SimpleNamespace(
        greedy_draft=True,
        temperatures=torch.ones(requests),
        corrected_logits=None,
        greedy_mask=torch.zeros(requests, dtype=torch.bool),
    )
    settings = sampling([1.0] * requests, top_k=3)
    accepted, bonus = accept(
        window, lens, torch.arange(requests) * 2, logits, block, settings, lens
    )
    allowed = logits.topk(3).indices.view(requests, 2, 3)
    for r in range(requests):
        assert int(bonus[r]) in allowed[r, int(accepted[r])].tolist()


@pytest.mark.parametrize("requests", [1, 4])
def test_what_is_committed_is_upstreams_own(requests: int) -> None:
    from sglang.kernels.ops.speculative.dspark.dspark_accept import finalize_accept_lens
    from sglang.kernels.ops.speculative.dspark.dspark_verify_window import build_out_tokens

    drafts = torch.randint(VOCAB, (requests, GAMMA))
    accepted = torch.tensor([0, GAMMA, 2, 1], dtype=torch.int32)[:requests]
    bonus, prefix = torch.randint(VOCAB, (requests,)), torch.randint(9, 99, (requests,))
    commit, lens, tokens = committed(drafts, accepted, bonus, prefix)
    theirs = finalize_accept_lens(
        correct_len=accepted, cap_trim_lens=torch.zeros_like(accepted), prefix_lens=prefix
    )
    expected = build_out_tokens(
        draft_tokens=drafts,
        correct_len=accepted,
        bonus=bonus,
        verify_num_draft_tokens=GAMMA + 1,
        gamma=GAMMA,
    )
    for ours, other in ((commit, theirs.commit_lens), (lens, theirs.new_seq_lens)):
        assert ours.dtype == other.dtype
        assert torch.equal(ours, other)
    assert torch.equal(tokens, expected)
