"""Requests that are followed keep the distribution: two steps of two requests, in rationals.

The second step is admitted by confidences that the first one's outcomes have shifted. Looking at
the outcome of the step that is being admitted breaks the distribution, and must be noticed.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from functools import cache

import numpy as np

from sglang_dspark.schedule.admission import admit
from sglang_dspark.schedule.budget import Workspace
from sglang_dspark.schedule.calibration import Calibration
from sglang_dspark.schedule.gains import gains
from sglang_dspark.schedule.online import OnlineCalibration
from sglang_dspark.verify import accept_sampled
from tests.schedule.batches import (
    GAMMA,
    Joint,
    Request,
    batch_probs,
    distribution_given_draft,
    plain_probs,
    tabled,
)
from tests.verify.chains import (
    Chain,
    Prefix,
    complete,
    draft_distribution,
    joint_distribution,
    quarters,
)

TOKENS = 3  # of each request, in the distribution that is compared
PAIR = Workspace(2, GAMMA)
SLOTS = (np.arange(2), np.ones(2, np.int64))
GREEDY = np.zeros(2, np.int64)
REQUESTS = (
    Request(
        quarters({0: (3, 1), 1: (1, 3)}, default=(2, 2)),
        quarters({0: (1, 3), 1: (2, 2)}, default=(3, 1)),
        tabled(0.6, {0: 0.7, 1: 0.4}),
    ),
    Request(
        quarters({0: (1, 3), 1: (2, 2)}, default=(1, 3)),
        quarters({0: (2, 2), 1: (3, 1)}, default=(2, 2)),
        tabled(0.55, {0: 0.5, 1: 0.65}),
    ),
)


def behind(chain: Chain, text: Prefix) -> Chain:
    """The chain of what comes after `text`."""
    return lambda prefix: chain(text + prefix)


@cache
def emitted(r: int, text: Prefix, draft: Prefix, length: int) -> dict[Prefix, Fraction]:
    """Distribution of request r's output in a step after `text`, draft and verify length given."""
    one = REQUESTS[r]
    here = replace(one, target=behind(one.target, text), drafter=behind(one.drafter, text))
    return distribution_given_draft(accept_sampled, here, draft, length, grid=12)


def outcomes(
    texts: tuple[Prefix, ...], calibration: OnlineCalibration, drafts: int
) -> list[tuple[Fraction, tuple[Prefix, ...], np.ndarray, np.ndarray, np.ndarray]]:
    """All ways a step behind `texts` can go: chance, what is emitted, logits, lengths, said."""
    found = []
    distributions = [
        draft_distribution(behind(q.drafter, text), GAMMA, argmax=False).items()
        for q, text in zip(REQUESTS, texts, strict=True)
    ]
    for drafted in itertools.product(*distributions):
        raw = [
            [q.confidence(draft[: k + 1]) for k in range(GAMMA)]
            for q, (draft, _) in zip(REQUESTS, drafted, strict=True)
        ]
        logits = np.log(raw / (1 - np.array(raw))).astype(np.float32)
        said = calibration.confidence(logits, GREEDY, np.empty_like(logits), SLOTS).copy()
        lengths = admit(gains(said), drafts, PAIR)
        each = [
            emitted(r, texts[r], draft, int(lengths[r])).items()
            for r, (draft, _) in enumerate(drafted)
        ]
        chance = drafted[0][1] * drafted[1][1]
        for first, second in itertools.product(*each):
            weight = chance * first[1] * second[1]
            if weight:
                found.append((weight, (first[0], second[0]), logits, lengths, said))
    return found


def two_steps(drafts: int, spread: float) -> tuple[Joint, int]:
    """Joint distribution of TOKENS tokens of both requests, and in how many ways the same head
    logits of the second step were admitted.
    """
    distribution: Joint = {}
    admitted: dict[bytes, set[bytes]] = {}
    table = Calibration((1.0,) * GAMMA, spread=spread)
    fresh = OnlineCalibration([table], pool_rows=2)
    for mass, texts, logits, lengths, said in outcomes(((), ()), fresh, drafts):
        calibration = OnlineCalibration([table], pool_rows=2)
        accepted = np.array([len(text) - 1 for text in texts])
        calibration.observe(logits, GREEDY, accepted, lengths, SLOTS, said)
        for weight, more, heads, second, _ in outcomes(texts, calibration, drafts):
            admitted.setdefault(heads.tobytes(), set()).add(second.tobytes())
            ends = [
                complete({text + rest: Fraction(1)}, q.target, TOKENS).items()
                if len(text + rest) < TOKENS
                else [((text + rest)[:TOKENS], Fraction(1))]
                for q, text, rest in zip(REQUESTS, texts, more, strict=True)
            ]
            for one, other in itertools.product(*ends):
                key = (one[0], other[0])
                distribution[key] = (
                    distribution.get(key, Fraction(0)) + mass * weight * one[1] * other[1]
                )
    ways = max(len(each) for each in admitted.values())
    return {key: mass for key, mass in distribution.items() if mass}, ways


def plainly() -> Joint:
    distributions = [joint_distribution(q.target, TOKENS).items() for q in REQUESTS]
    return {(a, b): x * y for (a, x), (b, y) in itertools.product(*distributions) if x * y}


def test_two_steps_with_requests_followed_are_exact() -> None:
    distribution, ways = two_steps(drafts=1, spread=3.0)
    assert distribution == plainly()
    assert ways > 1, "the shifts decide nothing, so the test shows nothing"


def test_confidence_of_a_step_cannot_depend_on_its_own_outcome() -> None:
    """No outcome of a step changes its confidences and admission; later steps differ."""
    logits = np.zeros((2, GAMMA), np.float32)
    after = []
    for accepted in ([0, 0], [GAMMA, GAMMA]):
        calibration = OnlineCalibration([Calibration((1.0,) * GAMMA, spread=0.5)], pool_rows=2)
        said = calibration.confidence(logits, GREEDY, np.empty_like(logits), SLOTS).copy()
        assert (said == 0.5).all()
        full = np.full(2, GAMMA)
        calibration.observe(logits, GREEDY, np.array(accepted), full, SLOTS, said)
        after.append(calibration.confidence(logits, GREEDY, np.empty_like(logits), SLOTS).copy())
    assert (after[0] < after[1]).all()


def peeking(request: Request) -> Request:
    """The mistake: x_k's own chance of acceptance shifts its confidence before it is admitted."""

    def confidence(drafts: Prefix) -> float:
        token, prefix = drafts[-1], drafts[:-1]
        sure = request.target(prefix)[token] >= request.drafter(prefix)[token]
        odds = request.confidence(drafts) / (1 - request.confidence(drafts))
        odds *= 3 if sure else 1 / 3
        return odds / (1 + odds)

    return replace(request, confidence=confidence)


def test_a_shift_by_the_present_outcome_is_caught() -> None:
    lagged = lambda confidence: admit(gains(confidence), 1, PAIR)  # noqa: E731
    assert batch_probs(accept_sampled, REQUESTS, lagged) == plain_probs(REQUESTS)
    wrong = (peeking(REQUESTS[0]), peeking(REQUESTS[1]))
    assert batch_probs(accept_sampled, wrong, lagged) != plain_probs(wrong)
