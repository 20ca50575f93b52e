"""Seeds of the step: first tokens and drafts are the choices of verify/seeded.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sglang")

from sglang_dspark.patches.cuda.seeds import sample, sample_draft_block
from sglang_dspark.step import seeds as step_seeds
from sglang_dspark.step.seeds import Seeds, seeded_draft, seeded_prefill
from sglang_dspark.verify.sampling import truncate
from sglang_dspark.verify.seeded import seeded_choice
from tests.backends.cpu.draft_world import ALL, settings

V, GAMMA, RANK = 40, 5, 3
SEEDS = [11, None, -5, 17]
CUTS = {"none": (ALL, 1.0, 0.0), "all": (9, 0.8, 0.1)}


def batch(top_k: int = ALL, top_p: float = 1.0, min_p: float = 0.0) -> SimpleNamespace:
    """Four sampled requests, three of them with a seed, of which the last one is greedy."""
    greedy = [False, False, False, True]
    params = [
        SimpleNamespace(sampling_seed=seed, top_k=1 if cold else top_k)
        for seed, cold in zip(SEEDS, greedy, strict=True)
    ]
    info = settings(
        torch.tensor([0.8, 1.0, 1.3, 0.0]),
        torch.full((4,), top_k),
        torch.full((4,), top_p),
        torch.full((4,), min_p),
    )
    reqs = [SimpleNamespace(sampling_params=each) for each in params]
    return SimpleNamespace(reqs=reqs, sampling_info=info, seq_lens=torch.tensor([4, 9, 30, 7]))


def drawn_freely(sampler: Any, probs: Tensor, info: Any, *rest: Any) -> tuple[Tensor, Any]:
    """Upstream's `_sample_from_probs` without a seed: int32 tokens, a capture where asked for."""
    return torch.full((len(probs),), V - 1, dtype=torch.int32), sampler


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
def test_first_tokens_are_the_seeds_choices(cuts: tuple[int, float, float]) -> None:
    asked = batch(*cuts)
    info, positions = asked.sampling_info, torch.tensor([9, 8, 4, 6], dtype=torch.int32)
    probs = (torch.randn(4, V, generator=torch.Generator().manual_seed(0)) * 2).softmax(-1)
    distribution = truncate(probs, info.top_ks, info.top_ps, info.min_ps)
    own = torch.tensor([11, 0, -5, 17])
    expected = seeded_choice(distribution, own, positions.long())
    uncut = seeded_choice(probs, own, positions.long())
    assert bool((uncut[[0, 2]] != expected[[0, 2]]).all()) == (cuts == CUTS["all"])
    with seeded_prefill(asked):
        tokens, _ = sample(drawn_freely, None, probs, info, positions, cuts == CUTS["none"])
    assert tokens.dtype == torch.int32
    assert tokens.tolist() == [int(expected[0]), V - 1, int(expected[2]), V - 1]
    after, _ = sample(drawn_freely, None, probs, info, positions, True)
    assert after.tolist() == [V - 1] * 4, "nothing stays behind a prefill"


@pytest.mark.parametrize("variates", [3 * V, V, 1, 1 << 22])
def test_drafts_are_the_same_however_many_rows_are_drawn_together(
    variates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wait takes some 50 bytes on its way: 256 requests of 152k tokens would take 2 GB."""
    from sglang_dspark.verify import seeded

    asked: list[int] = []
    monkeypatch.setattr(seeded, "_AT_ONCE", variates)

    def waits(*rows: torch.Tensor) -> torch.Tensor:
        asked.append(len(rows[0]))
        return seeded.waits(*rows)

    values, anchors = torch.tensor([11, -5, 17, 8, 8]), torch.tensor([4, 9, 30, 7, 7, 1])
    logits, temperatures = torch.randn(6, V), torch.tensor([0.8, 1.0, 1.3, 0.5, 1.0, 2.0])
    rows = torch.tensor([0, 1, 3, 4, 5])
    drafts = step_seeds.DraftSeeds(Seeds(rows, values), anchors, waits)
    found = drafts.drawn(torch.full((6,), -1), logits, temperatures, place=2)
    distributions = torch.softmax(logits[rows].double() / temperatures[rows, None], -1)
    assert found[rows].tolist() == seeded_choice(distributions, values, anchors[rows] + 2).tolist()
    assert int(found[2]) == -1
    assert max(asked) == min(max(variates // V, 1), 5)


def test_a_captured_weight_is_found_anew_with_the_token() -> None:
    from sglang.srt.layers.sampler import _SamplingMaskCapture

    asked, probs = batch(), torch.full((4, V), 1 / V)
    capture = _SamplingMaskCapture(probs, None, torch.ones(4), torch.arange(4))
    with seeded_prefill(asked):
        _, kept = sample(drawn_freely, capture, probs, asked.sampling_info, torch.arange(4), True)
    assert kept.selected_weight is None
    assert kept.weights is probs


class Head(nn.Module):
    """A vanilla Markov head of upstream's, with weights of its own."""

    def __new__(cls) -> Any:
        from sglang.srt.models.dspark import VanillaMarkov

        torch.manual_seed(3)
        return VanillaMarkov(vocab_size=V, markov_rank=RANK)


def new_noise() -> Any:
    """Upstream's noise of the requests without a seed, at its first position."""
    from sglang.srt.speculative.dspark_components import dspark_draft

    return dspark_draft.DraftNoise(key=7, offset=torch.zeros(1, dtype=torch.int64))


def drafted(
    asked: Any, base: Tensor, anchors: Tensor, seeds: Seeds | None, noise: Any = None
) -> Any:
    """The block of a step through the hook, with upstream's own sampler for the rest."""
    from sglang.srt.speculative.dspark_components import dspark_draft

    proposer = SimpleNamespace(_draft_sampler="in graph")
    with seeded_draft(proposer, asked, seeds), torch.no_grad():
        assert (proposer._draft_sampler is None) == (seeds is not None)
        block = sample_draft_block(
            dspark_draft.sample_draft_block,
            base_logits=base,
            anchor_tokens=anchors,
            draft_hidden=None,
            sampling_info=asked.sampling_info,
            markov_head=Head(),
            noise=noise or new_noise(),
            device=torch.device("cpu"),
            tp_sync=SimpleNamespace(sync=lambda site, x: x),
            greedy_draft=False,
        )
    assert proposer._draft_sampler == "in graph"
    return block


def test_drafts_of_seeded_requests_are_the_seeds_choices() -> None:
    """A drafter that is the target: each draft is what the target would choose behind it."""
    asked, generator = batch(), torch.Generator().manual_seed(1)
    base = torch.randn(4, GAMMA, V, generator=generator)
    anchors = torch.randint(0, V, (4,), generator=generator)
    free = drafted(asked, base, anchors, None)
    block = drafted(asked, base, anchors, step_seeds.seeds_of(asked))
    # Logits are those of the drafts that were chosen.
    head = Head()
    before = torch.cat([anchors[:, None], block.draft_tokens[:, :-1]], 1)
    logits = base + head.markov_w2(head.markov_w1(before)).detach()
    assert torch.allclose(block.corrected_logits, logits, atol=1e-5)
    temperature = asked.sampling_info.temperatures.view(-1, 1, 1)
    for row in (0, 2):
        places = torch.arange(GAMMA)
        expected = seeded_choice(
            (logits / temperature).softmax(-1)[row],
            torch.full((GAMMA,), SEEDS[row]),
            int(asked.seq_lens[row]) + places,
        )
        assert block.draft_tokens[row].tolist() == expected.tolist()
    assert torch.equal(block.draft_tokens[[1, 3]], free.draft_tokens[[1, 3]])
    assert not torch.equal(block.draft_tokens[[0, 2]], free.draft_tokens[[0, 2]])
    assert not block.greedy_draft


def test_noise_advances_by_one_position_for_each_block() -> None:
    """As in upstream's sampler; otherwise every step would reuse the noise of the first one."""
    asked, base = batch(), torch.zeros(4, GAMMA, V)
    seeded, free = new_noise(), new_noise()
    blocks = []
    for number in (1, 2):
        anchors = torch.zeros(4, dtype=torch.int64)
        blocks.append(drafted(asked, base, anchors, step_seeds.seeds_of(asked), seeded))
        drafted(asked, base, anchors, None, free)
        assert seeded.offset.tolist() == free.offset.tolist() == [number]
    first, second = (block.draft_tokens for block in blocks)
    assert not torch.equal(first[1], second[1])  # no seed
    assert torch.equal(first[[0, 2]], second[[0, 2]])  # the same seeds at the same positions


def test_seed_zero_is_a_seed() -> None:
    asked = batch()
    for req, seed in zip(asked.reqs, [0, None, 5, 0], strict=True):
        req.sampling_params.sampling_seed = seed  # the last request is greedy
    found = step_seeds.seeds_of(asked)
    assert found is not None
    assert (found.rows.tolist(), found.values.tolist()) == ([0, 2], [0, 5])
    asked.reqs[2].sampling_params.sampling_seed = None
    found = step_seeds.seeds_of(asked)
    assert found is not None
    assert (found.rows.tolist(), found.values.tolist()) == ([0], [0])


def test_a_batch_without_seeds_is_drafted_and_prefilled_by_upstream() -> None:
    asked = batch()
    for req in asked.reqs[:3]:
        req.sampling_params.sampling_seed = None
    assert step_seeds.seeds_of(asked) is None
    before = dict(vars(asked.sampling_info))
    with seeded_prefill(asked):
        assert vars(asked.sampling_info) == before


def test_logits_of_a_seeded_draft_are_as_wide_as_upstreams() -> None:
    """The head's weights may be wider than the base logits."""
    logits = step_seeds._step_logits(Head(), torch.zeros(2, GAMMA, V, dtype=torch.bfloat16))
    assert (logits.shape, logits.dtype) == ((2, GAMMA, V), torch.float32)
