"""Test that improbable draft tokens stay rare, at the real vocabulary and without cuts.

A draft that was not drawn from the distribution it claims breaks verification: min(1, p / q) keeps
every draft of q = 1e-10 and p = 1e-8. Its probability must therefore be right far below what
float32 noise resolves. A Poisson test compares counts with the distribution, and the same test must
catch exponentials in float32, one in 2^23 of which is 0 and wins.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from sglang_dspark.backends.cpu import reduced_head
from sglang_dspark.backends.cpu.accept import accept
from tests.backends.cpu.draft_world import Drafting, settings

V, INSIDE, GAMMA = 49_152, 8_192, 5  # of the shipped drafter
LIKELY = 0  # the token that draft and target nearly always choose
Q, P = 1e-10, 1e-8  # of each other token of the draft vocabulary, by draft and target
ALARM = 1e-4


def tail_p_value(found: int, expected: float) -> float:
    """Two-sided p-value of a Poisson count."""
    k, mean = torch.tensor([float(found), found + 1.0]).double(), torch.tensor(expected).double()
    at_least = float(torch.special.gammainc(k[0], mean)) if found else 1.0
    at_most = float(torch.special.gammaincc(k[1], mean))
    return min(1.0, 2 * min(at_least, at_most))


@pytest.fixture(scope="module")
def drafting() -> Drafting:
    """Without transition bias: base logits alone give the draft's distribution."""
    tokens = torch.arange(INSIDE) * (V // INSIDE)
    return Drafting(tokens, torch.zeros(V, 4), torch.zeros(INSIDE, 4))


@pytest.fixture
def float32_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault: every token races with an exponential in float32."""
    noise = np.random.Generator(np.random.Philox(key=[3, 4]))

    def race(probs: Tensor, uniforms: Tensor) -> Tensor:
        waits = torch.from_numpy(noise.standard_exponential(tuple(probs.shape), dtype=np.float32))
        return (probs.log() - waits.log()).argmax(-1)

    monkeypatch.setattr(reduced_head, "sample_inverse_cdf", race)


def base_logits(rows: int) -> Tensor:
    """[rows, GAMMA, INSIDE], q = Q for all but the likely token."""
    base = torch.full((rows, GAMMA, INSIDE), float(np.log(Q)))
    base[:, :, LIKELY] = 0.0
    return base


def drafted_junk(drafting: Drafting, blocks: int, rows: int = 40) -> tuple[int, int, int]:
    """Unlikely drafts of sampled and of greedy requests, and sampled positions."""
    half = torch.arange(rows) < rows // 2
    info = settings(torch.where(half, 1.0, 0.0))
    base, anchors = base_logits(rows), torch.zeros(rows, dtype=torch.int64)
    sampled = greedy = 0
    for _ in range(blocks):
        junk = drafting.block(base, anchors, info).draft_tokens != LIKELY
        sampled += int(junk[half].sum())
        greedy += int(junk[~half].sum())
    return sampled, greedy, blocks * GAMMA * rows // 2


def test_unlikely_drafts_are_as_rare_as_their_distribution_says(drafting: Drafting) -> None:
    sampled, greedy, positions = drafted_junk(drafting, blocks=200)
    expected = positions * (INSIDE - 1) * Q
    p_value = tail_p_value(sampled, expected)
    print(f"\n{sampled} unlikely drafts of {positions}, {expected:.2f} expected, p {p_value:.2g}")
    assert p_value > ALARM
    assert greedy == 0, "a greedy request beside sampled ones drafts its likeliest token"


@pytest.mark.usefixtures("float32_race")
def test_exponentials_in_float32_are_caught_in_the_drafts(drafting: Drafting) -> None:
    sampled, _, positions = drafted_junk(drafting, blocks=200)
    assert tail_p_value(sampled, positions * (INSIDE - 1) * Q) < ALARM


def emitted_junk(drafting: Drafting, steps: int, rows: int = 32) -> tuple[int, float]:
    """Count unlikely tokens that whole windows emit, and the count that the target expects."""
    info = settings(torch.ones(rows))
    lens = torch.full((rows,), GAMMA + 1)
    starts = torch.arange(rows) * (GAMMA + 1)
    anchors, base = torch.zeros(rows, dtype=torch.int64), base_logits(rows)
    logits = torch.full((V,), float(np.log(1e-12)))
    logits[drafting.head.tokens] = float(np.log(P))
    logits[LIKELY] = 0.0
    distribution = torch.softmax(logits.double(), 0)
    logits = logits.expand(rows * (GAMMA + 1), V)
    junk = emitted = 0
    for _ in range(steps):
        block = drafting.block(base, anchors, info)
        window = torch.cat([anchors[:, None], block.draft_tokens], 1)
        accepted, bonus = accept(window, lens, starts, logits, block, info, anchors)
        kept = torch.arange(GAMMA)[None, :] < accepted[:, None]
        junk += int((block.draft_tokens[kept] != LIKELY).sum() + (bonus != LIKELY).sum())
        emitted += int(accepted.sum()) + rows
    return junk, emitted * float(1 - distribution[LIKELY])


def test_emitted_tokens_keep_the_targets_tail(drafting: Drafting) -> None:
    torch.manual_seed(0)
    found, expected = emitted_junk(drafting, steps=100)
    p_value = tail_p_value(found, expected)
    print(f"\n{found} unlikely tokens emitted, {expected:.2f} expected, p {p_value:.2g}")
    assert p_value > ALARM


@pytest.mark.slow
@pytest.mark.usefixtures("float32_race")
def test_exponentials_in_float32_are_caught_in_the_output(drafting: Drafting) -> None:
    torch.manual_seed(0)
    assert tail_p_value(*emitted_junk(drafting, steps=100)) < ALARM


def test_greedy_drafts_of_sampled_requests_are_accepted_as_sampled() -> None:
    """With SGLANG_DSPARK_USE_GREEDY_DRAFT next to a greedy request; the accept rule reads both."""
    from sglang_dspark.backends.cpu.draft import DraftHeads

    torch.manual_seed(0)
    world = Drafting(torch.arange(6), torch.randn(6, 2), torch.randn(6, 2))
    tp_sync = SimpleNamespace(sync=lambda site, x: x, enabled=lambda site: False)
    heads = DraftHeads(None, world.noise, tp_sync, world.head, greedy_only=True)
    info, anchors = settings(torch.tensor([0.0, 0.8])), torch.tensor([1, 2])
    base = torch.randn(2, 3, 6)
    block = heads.sample(base, anchors, torch.empty(0), info, anchors, None)
    assert block.greedy_draft
    assert block.greedy_mask.tolist() == [True, False]
