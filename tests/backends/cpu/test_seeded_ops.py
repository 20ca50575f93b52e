"""Seeds on a CPU: compiled draws are the reference's, the accept rule and the sampler use them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_dspark.backends.cpu import seeded_ops
from sglang_dspark.backends.cpu.accept import accept
from sglang_dspark.patches.cpu.seeds import UNSEEDED, batch_seeds
from sglang_dspark.step.seeds import Seeds
from sglang_dspark.verify.seeded import seeded_choice, waits
from tests.backends.cpu.draft_world import Drafting

VOCAB = 300
SEEDS = torch.tensor([0, 42, -1, 2**62 + 5, -(2**63) + 7, 9, 10, 11])
POSITIONS = torch.tensor([0, 5, 77, 123_456, 2**31 - 1, 3, 4, 5])


@pytest.mark.parametrize("kept", [1, 3, VOCAB])
@pytest.mark.parametrize("sharpness", [0.1, 3.0, 30.0])
def test_compiled_choice_is_the_references(kept: int, sharpness: float) -> None:
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(kept)) * sharpness
    probs = logits.softmax(-1)
    probs = torch.where(probs >= probs.topk(kept).values[:, -1:], probs, 0.0)
    assert seeded_ops.choose(probs, SEEDS, POSITIONS).equal(seeded_choice(probs, SEEDS, POSITIONS))


def test_compiled_waits_are_the_references() -> None:
    tokens = torch.tensor([5, 0, 299, 49_151])
    expected = waits(SEEDS, POSITIONS, tokens).float()
    assert seeded_ops.waits(SEEDS, POSITIONS, tokens).equal(expected)


def info(temperatures: list[float]) -> SimpleNamespace:
    """Build the `SamplingBatchInfo` fields that the accept path reads."""
    rows = len(temperatures)
    greedy = [t == 0 for t in temperatures]
    return SimpleNamespace(
        is_all_greedy=all(greedy),
        is_any_greedy=any(greedy),
        temperatures=torch.tensor([t or 1.0 for t in temperatures])[:, None],
        top_ks=torch.tensor([1 if g else 1 << 30 for g in greedy], dtype=torch.int32),
        top_ps=torch.ones(rows),
        min_ps=torch.zeros(rows),
    )


def test_seeded_greedy_and_free_requests_in_one_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, VOCAB, generator=generator)  # three windows of three rows
    settings, seeds = info([0.9, 0.9, 0.0]), Seeds(torch.tensor([0]), torch.tensor([7]))
    anchors, rows = torch.tensor([20, 30, 40]), torch.arange(3)
    own = seeded_choice((logits[:3] / 0.9).softmax(-1), torch.full((3,), 7), 20 + rows)
    window = torch.zeros(3, 4, dtype=torch.int64)
    window[0, 1:3] = own[:2]
    window[2, 1:3] = logits[6:8].argmax(-1)
    block = SimpleNamespace(
        greedy_draft=True,
        temperatures=torch.ones(3),
        corrected_logits=None,
        greedy_mask=torch.tensor([False, False, True]),
    )
    lens, starts = torch.full((3,), 3), rows * 3
    torch.manual_seed(0)
    free = set()
    for _ in range(5):
        accepted, bonus = accept(window, lens, starts, logits, block, settings, anchors, seeds)
        assert (int(accepted[0]), int(bonus[0])) == (2, int(own[2]))
        assert (int(accepted[2]), int(bonus[2])) == (2, int(logits[8].argmax()))
        free.add((int(accepted[1]), int(bonus[1])))
    assert len(free) > 1, "a request without a seed must not be tied to one"


@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_seeded_drafts_are_the_seeds_own_choices(temperature: float) -> None:
    """Beside requests without a seed, whose uniforms decide, and a greedy one."""
    gamma, inside, rank = 3, 40, 4
    generator = torch.Generator().manual_seed(8)
    tokens = torch.arange(inside) * 7
    w1 = torch.randn(VOCAB, rank, generator=generator)
    w2 = torch.randn(inside, rank, generator=generator)
    drafting = Drafting(tokens, w1, w2)
    base = torch.randn(1, gamma, inside, generator=generator).repeat(4, 1, 1) * 2
    settings = info([temperature, temperature, 0.0, temperature])
    seeds = Seeds(torch.tensor([0, 3]), torch.tensor([7, 0]))  # 0 is a seed too
    anchors = torch.tensor([30, 31, 32, 33])
    free = set()
    for _ in range(6):
        block = drafting.block(base, torch.full((4,), 5), settings, anchors, seeds)
        for row, seed in ((0, 7), (3, 0)):
            previous = 5
            for k in range(gamma):
                distribution = torch.softmax((base[row, k] + w1[previous] @ w2.T) / temperature, -1)
                full = torch.zeros(VOCAB).index_copy_(0, tokens, distribution)
                own = seeded_choice(full[None], torch.tensor([seed]), anchors[row, None] + k)
                assert int(block.draft_tokens[row, k]) == int(own)
                previous = int(own)
        assert int(block.draft_tokens[2, 0]) == int(tokens[(base[2, 0] + w1[5] @ w2.T).argmax()])
        free.add(tuple(block.draft_tokens[1].tolist()))
    assert len(free) > 1, "a request without a seed must not be tied to one"


def test_seeds_of_requests() -> None:
    reqs = [
        SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed))
        for seed in (5, None, 0, -1)
    ]
    assert batch_seeds(reqs).tolist() == [5, UNSEEDED, 0, -1]
    assert batch_seeds(reqs[:0]).tolist() == []


@pytest.mark.parametrize("cuts", [None, (3, 1.0, 0.0), (VOCAB, 0.7, 0.0), (VOCAB, 1.0, 0.1)])
def test_plain_sampler_draws_by_seed(
    cuts: tuple[int, float, float] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.layers import sampler

    from sglang_dspark.patches.cpu.seeds import sample
    from sglang_dspark.verify.sampling import truncate

    probs = (torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4)) * 2).softmax(-1)
    row_seeds, positions = torch.tensor([7, UNSEEDED, 8]), torch.tensor([3, 3, 9])
    top_k, top_p, min_p = cuts or (VOCAB, 1.0, 0.0)
    info = SimpleNamespace(
        sampling_seed=row_seeds,
        top_ks=torch.full((3,), top_k),
        top_ps=torch.full((3,), top_p),
        min_ps=torch.full((3,), min_p),
        need_min_p_sampling=min_p > 0,
        sampling_mask_batch_indices=torch.arange(3),
        max_top_k=None,
    )
    kept = probs if cuts is None else truncate(probs, info.top_ks, info.top_ps, info.min_ps)
    expected = seeded_choice(kept, row_seeds, positions)
    kernel = SimpleNamespace(sampling_backend="pytorch")
    monkeypatch.setattr(sampler, "get_exec", lambda: SimpleNamespace(kernel=kernel))
    original, free = sampler.Sampler._sample_from_probs, set()
    for _ in range(8):
        drawn, capture = sample(original, None, probs.clone(), info, positions, cuts is None)
        assert info.sampling_seed is row_seeds
        assert capture.selected_weight is None  # computed again, from the seeded tokens
        assert drawn.view(-1)[[0, 2]].tolist() == expected[[0, 2]].tolist()
        free.add(int(drawn.view(-1)[1]))
    assert len(free) > 1
