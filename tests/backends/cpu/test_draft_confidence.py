"""Confidence of drafters without a head: the served heads estimate it, and admission by it is
lossless.

The distribution test is that of test_accept_distribution.py with windows that the estimates choose:
the served draft, the calibration, top-K admission in batches of eight, and the served accept rule.
It must catch a source that looks at the drafted token.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_dspark.backends.cpu import accept as served
from sglang_dspark.backends.cpu import reduced_head
from sglang_dspark.schedule.admission import admit
from sglang_dspark.schedule.budget import Workspace
from sglang_dspark.schedule.gains import gains
from sglang_dspark.schedule.rehearsal import uncalibrated
from sglang_dspark.step.seeds import Seeds
from sglang_dspark.verify import sample_inverse_cdf
from tests.backends.cpu.draft_world import Drafting, settings
from tests.backends.cpu.operator_levels import LEVELS, force_level
from tests.backends.cpu.test_accept_distribution import (
    ALARM,
    ANCHOR,
    BASE,
    GAMMA,
    TARGET,
    V,
    chain,
    chi_square,
    drafting,
    table,
)
from tests.backends.cpu.test_reduced_head import Draft, inputs, one_rank, sampling

__all__ = ["one_rank"]

REQUESTS = 8  # of a batch that shares its admitted drafts
BATCH, ROUNDS = 40_000, 5
UNCUT = (1 << 30, 1.0, 0.0)
Source = Callable[[Tensor, Any, Tensor], Tensor]  # estimates, block, temperatures -> logits


def exactly(logits: Tensor, temperature: Tensor) -> Tensor:
    """log(p / (1 - p)) of the largest probability in float64, [R, d, n] and [R] -> [R, d]."""
    ordered = (logits.double() / temperature[:, None, None]).sort(-1, descending=True).values
    return ordered[..., 0] - torch.logsumexp(ordered[..., 1:], -1)


@pytest.mark.parametrize("level", [*LEVELS, None])
@pytest.mark.parametrize("inside", [1, 63, 64, 200])
def test_greedy_blocks_are_estimated_from_the_logits_they_drafted_by(
    inside: int, level: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled for each instruction set and by torch, at widths that fill no register."""
    force_level(monkeypatch, reduced_head, level)
    if level is None:
        monkeypatch.setattr(reduced_head.ReducedHead, "supports_kernel", False)
    rows, rank = 3, 16
    w1, w2 = table(11, 256, rank), table(12, inside, rank)
    base, anchors = 3 * table(13, rows * 4, inside).view(rows, 4, inside), torch.tensor([5, 9, 200])
    world = Drafting(torch.arange(inside), w1, w2)
    found = torch.full((rows, 4), torch.nan)
    tokens = world.block(base, anchors, None, confidence=found).draft_tokens
    assert torch.equal(tokens, world.block(base, anchors, None).draft_tokens)
    previous = torch.cat([anchors[:, None], tokens[:, :-1]], 1)
    expected = exactly(base + w1[previous] @ w2.T, torch.ones(rows))
    torch.testing.assert_close(found.double().sigmoid(), expected.sigmoid(), atol=1e-6, rtol=1e-5)


def test_ranks_that_agree_on_each_draft_estimate_the_same() -> None:
    """One position at a time, as the tokens have to be exchanged."""
    w1, w2, base = table(11, 64, 16), table(12, 32, 16), table(13, 12, 32).view(3, 4, 32)
    head = reduced_head.ReducedHead(torch.arange(32), torch.empty(32, 1), w1, w2)
    anchors, whole, agreed = torch.tensor([5, 9, 60]), torch.empty(3, 4), torch.empty(3, 4)
    reduced_head.draft_greedy(head, base, anchors, None, whole)
    reduced_head.draft_greedy(head, base, anchors, lambda tokens: tokens, agreed)
    assert torch.equal(agreed, whole)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("restricted", [True, False], ids=["reduced", "whole vocabulary"])
@pytest.mark.parametrize("temperatures", [[0.0, 0.0], [1.0, 0.4], [0.7, 0.0]])
@pytest.mark.parametrize("seeded", [False, True])
def test_estimates_are_those_of_the_drafted_distributions(
    restricted: bool, temperatures: list[float], seeded: bool
) -> None:
    """At the requests' temperatures, of greedy ones at 1; the drafts stay what they were."""
    draft = Draft(restricted=restricted)
    draft.hook()
    rows = len(temperatures)
    hidden, anchors = inputs(3, rows)
    info = sampling(temperatures)
    info.temperatures[info.top_ks <= 1] = 0.3  # a request may be greedy by top-k 1 alone
    seeds = Seeds(torch.tensor([0]), torch.tensor([42])) if seeded else None
    found = torch.full((rows, 5), torch.nan)
    block, base = drafted(draft, hidden, anchors, info, seeds, found)
    draft.noise.offset.zero_()
    without, _ = drafted(draft, hidden, anchors, info, seeds, None)
    assert torch.equal(block.draft_tokens, without.draft_tokens)
    assert block.greedy_draft == without.greedy_draft
    assert torch.equal(block.greedy_mask, without.greedy_mask)
    assert torch.equal(block.temperatures, without.temperatures)
    previous = torch.cat([anchors[:, None], block.draft_tokens[:, :-1]], 1)
    head = draft.model.markov_head
    bias = head.markov_w1(previous) @ head.markov_w2.weight.T  # [R, GAMMA, V]
    if restricted:
        bias = bias[..., draft.allowed]
    temperature = torch.tensor([t or 1.0 for t in temperatures])
    expected = exactly((base + bias).detach(), temperature)
    torch.testing.assert_close(found.double().sigmoid(), expected.sigmoid(), atol=1e-5, rtol=1e-4)


def drafted(
    draft: Draft, hidden: Tensor, anchors: Tensor, info: Any, seeds: Any, found: Tensor | None
) -> tuple[Any, Tensor]:
    """Upstream's block, its confidence in `found`, and base logits [R, 5, n]."""
    from sglang_dspark.backends.cpu.draft import DraftHeads

    heads = DraftHeads(draft.model, draft.noise, draft.sync, draft.reduced, greedy_only=False)
    with torch.inference_mode():
        base, _ = heads.base_logits(hidden)
        shaped = base.view(len(anchors), 5, -1)
        return heads.sample(shaped, anchors, hidden, info, anchors, seeds, found), shaped


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("has_head", [True, False])
def test_a_proposal_has_the_heads_logits_or_the_estimates(
    has_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of upstream's own head by upstream's code; admission reads nothing else of a proposal."""
    from sglang.srt.models.dspark import DSparkConfidenceHead

    from sglang_dspark.backends.cpu import draft as draft_module

    monkeypatch.setattr(draft_module.mode, "estimates_confidence", lambda has_head: not has_head)
    world, (hidden, anchors) = Draft(restricted=True), inputs(3, 2)
    head = DSparkConfidenceHead(
        hidden_size=hidden.shape[1], markov_rank=world.model.markov_head.markov_rank
    )
    world.model.confidence_head = head if has_head else None
    worker = SimpleNamespace(
        draft_model=world.model,
        draft_model_runner=None,
        gamma=5,
        sample_from_anchor=True,
        device="cpu",
        _proposer=SimpleNamespace(noise=world.noise),
        _tp_sync=world.sync,
        _greedy_draft=False,
        _mask_token_id=0,
        _draft_context=torch.inference_mode,
    )
    drafter = draft_module.Drafter(worker)
    monkeypatch.setattr(drafter, "_hidden", lambda *_: hidden)
    bonus = SimpleNamespace(bonus_tokens=anchors)
    batch = SimpleNamespace(spec_info=bonus, sampling_info=sampling([0.0, 0.0]), seq_lens=anchors)
    found = drafter.propose(batch, None, 5, None)
    drafts = found.draft_block.draft_tokens
    if has_head:
        with torch.no_grad():
            _, expected = head.predict(
                hidden,
                anchor_tokens=anchors,
                draft_tokens=drafts,
                markov_head=world.model.markov_head,
            )
    else:
        expected = torch.empty(2, 5)
        world.hook()
        drafted(world, hidden, anchors, sampling([0.0, 0.0]), None, expected)
    torch.testing.assert_close(found.confidence_raw, expected, atol=1e-5, rtol=1e-5)


def test_estimates_of_a_prefix_are_the_same_for_every_token_drawn() -> None:
    """Behind the same drafts; those of the first position are one number."""
    rows = 4000
    found = torch.empty(rows, GAMMA)
    tokens = block_of(rows, found, 0.8).draft_tokens
    assert len(found[:, 0].unique()) == 1 < len(tokens[:, 0].unique())
    for first in tokens[:, 0].unique():
        behind = tokens[:, 0] == first
        assert len(found[behind, 1].unique()) == 1


def block_of(rows: int, confidence: Tensor, temperature: float) -> Any:
    info = settings(torch.full((rows,), temperature))
    anchors = torch.full((rows,), ANCHOR)
    base = BASE.expand(rows, -1, -1).contiguous()
    return drafting().block(base, anchors, info, confidence=confidence)


def honest(estimates: Tensor, block: Any, temperatures: Tensor) -> Tensor:
    return estimates


def peeking(estimates: Tensor, block: Any, temperatures: Tensor) -> Tensor:
    """The mistake: the probability of the drafted token itself."""
    probs = torch.softmax(block.corrected_logits / temperatures[:, None, None], -1)
    return probs.gather(2, block.draft_tokens[:, :, None])[..., 0].logit(1e-6)


def argmax_alone(estimates: Tensor, block: Any, temperatures: Tensor) -> Tensor:
    """The mistake: the estimate, but nothing for a token that is not the likeliest."""
    likeliest = block.draft_tokens == block.corrected_logits.argmax(-1)
    return torch.where(likeliest, estimates, -10.0)


def lengths_of(logits: Tensor) -> Tensor:
    """Drafts admitted of logits [R, GAMMA]: half of all, in batches of REQUESTS."""
    rows = len(logits)
    calibration = uncalibrated(GAMMA, 1)
    said = np.empty((rows, GAMMA), np.float32)
    calibration.confidence(logits.numpy(), np.ones(rows, np.int64), said)
    survivals, lengths = gains(said), np.empty(rows, np.int64)
    workspace = Workspace(REQUESTS, GAMMA)
    for start in range(0, rows, REQUESTS):
        batch = slice(start, start + REQUESTS)
        admit(survivals[batch], REQUESTS * GAMMA // 2, workspace, out=lengths[batch])
    return torch.from_numpy(lengths)


def two_tokens(source: Source, temperature: float, generator: torch.Generator) -> Tensor:
    """The first two tokens of BATCH requests, [BATCH, 2]; the second by the target if need be."""
    estimates, given = torch.empty(BATCH, GAMMA), torch.full((BATCH,), temperature)
    # Odd requests are surer of everything: neighbours compete for the places.
    block = block_of(BATCH, estimates, temperature)
    logits = source(estimates, block, given) + (torch.arange(BATCH) % 2)[:, None] * 0.3
    lens = 1 + lengths_of(logits)
    info, anchors = settings(given), torch.full((BATCH,), ANCHOR)
    window = torch.cat([anchors[:, None], block.draft_tokens], 1)
    inside = torch.arange(GAMMA + 1)[None, :] < lens[:, None]
    starts = lens.cumsum(0) - lens
    accepted, bonus = served.accept(
        window, lens, starts, TARGET[window[inside]], block, info, anchors
    )
    first = torch.where(accepted > 0, window[:, 1], bonus)
    then = torch.where(accepted > 1, window[:, 2], bonus)
    uniforms = torch.rand(BATCH, dtype=torch.float64, generator=generator)
    follow = sample_inverse_cdf(chain(temperature, UNCUT)[first], uniforms)
    return torch.stack([first, torch.where(accepted > 0, then, follow)], 1)


def p_value(source: Source, temperature: float, rounds: int = ROUNDS, seed: int = 0) -> float:
    """Chi-square p-value of the first two tokens."""
    generator = torch.Generator().manual_seed(seed + 1)  # not the accept rule's coins
    torch.manual_seed(seed)
    drafting().noise.offset.fill_(seed * 10_000)
    counts = torch.zeros(V * V)
    for _ in range(rounds):
        pair = two_tokens(source, temperature, generator)
        counts += torch.bincount(pair[:, 0] * V + pair[:, 1], minlength=V * V)
    target = chain(temperature, UNCUT)
    expected = (target[ANCHOR][:, None] * target).flatten() * counts.sum()
    return chi_square(counts.double(), expected)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_admission_by_estimates_keeps_the_distribution(temperature: float) -> None:
    assert p_value(honest, temperature) > ALARM


@pytest.mark.parametrize("source", [peeking, argmax_alone])
def test_a_source_that_looks_at_the_drafted_token_is_caught(source: Source) -> None:
    assert p_value(source, 1.0) < 1e-12
