"""Lossless schedules: exact joint distribution of two requests, in rationals, by the planner.

The lagged K with top-K admission and Algorithm 1 are exact; floors and limits are the business of
test_bounded_lossless.py. Known mistakes are built here on purpose, each by
name, and must have another distribution.
"""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from sglang_dspark.drafter.draft_confidence import draft_confidence
from sglang_dspark.schedule.admission import admit
from sglang_dspark.schedule.budget import Costs, Workspace, early_stop, search
from sglang_dspark.schedule.gains import gains
from sglang_dspark.verify import accept_block, accept_sampled
from tests.schedule.batches import (
    GAMMA,
    Confidence,
    Request,
    Schedule,
    batch_probs,
    plain_probs,
    tabled,
)
from tests.verify import block_cells, mutants
from tests.verify.chains import Chain, Prefix, quarters

TARGET = quarters({0: (3, 1), 1: (1, 3)}, default=(2, 2))
DRAFTER = quarters({0: (1, 3), 1: (2, 2)}, default=(3, 1))
OTHER_TARGET = quarters({0: (1, 3), 1: (2, 2)}, default=(1, 3))
OTHER_DRAFTER = quarters({0: (2, 2), 1: (3, 1)}, default=(2, 2))
PAIR = Workspace(2, GAMMA)

HEADS: dict[str, tuple[Confidence, Confidence]] = {
    "distinct": (tabled(0.75, {0: 0.9, 1: 0.2}), tabled(0.7, {0: 0.3, 1: 0.8})),
    # 0.5 = 1 * 0.5 in one request meets 0.5 in the other, and 1.0 behind 0.5 ties with itself
    "ties": (tabled(1.0, {0: 0.5, 1: 1.0}), tabled(0.5, {0: 1.0, 1: 0.5})),
    "all tied": (tabled(1.0, {0: 1.0, 1: 1.0}), tabled(1.0, {0: 1.0, 1: 1.0})),
    "zeros": (tabled(0.0, {0: 1.0, 1: 0.5}), tabled(0.5, {0: 0.0, 1: 1.0})),
}


def pair(heads: tuple[Confidence, Confidence], *, argmax: bool = False) -> tuple[Request, Request]:
    return (
        Request(TARGET, DRAFTER, heads[0], argmax),
        Request(OTHER_TARGET, OTHER_DRAFTER, heads[1], argmax),
    )


def lagged(drafts: int) -> Schedule:
    """K fixed before drafting, the drafts of largest present survival."""
    return lambda confidence: admit(gains(confidence), drafts, PAIR)


def stopping(costs: Costs, workspace: Workspace = PAIR) -> Schedule:
    """Algorithm 1 on the present step."""

    def schedule(confidence: np.ndarray) -> np.ndarray:
        survivals = gains(confidence)
        return admit(survivals, early_stop(survivals, costs, workspace).drafts, workspace)

    return schedule


def peeking(costs: Costs, workspace: Workspace = PAIR) -> Schedule:
    """The mistake: global search on the present step's survivals."""

    def schedule(confidence: np.ndarray) -> np.ndarray:
        survivals = gains(confidence)
        found = search(survivals, costs, workspace, must_draft=True)
        return admit(survivals, found.drafts, workspace)

    return schedule


def jagged(*sps: float) -> Costs:
    """Costs from steps a second at B = 1, 2, ..."""
    return Costs(np.array([1.0, *(1 / s for s in sps)]), 0.0, np.zeros(GAMMA + 1))


# Two requests start at B = 2. SMOOTH lets Algorithm 1 go on as far as the survivals allow; on
# STAIRS only good drafts of both requests, all verified, beat verifying none.
SMOOTH = jagged(1.0, 1.0, 0.80, 0.66, 0.56, 0.49)
STAIRS = jagged(1.0, 1.0, 0.55, 0.56, 0.50, 0.48)


@pytest.mark.parametrize("name", sorted(HEADS))
@pytest.mark.parametrize("drafts", range(5))
def test_lagged_admission_is_exact(name: str, drafts: int) -> None:
    requests = pair(HEADS[name])
    assert batch_probs(accept_sampled, requests, lagged(drafts)) == plain_probs(requests)


@pytest.mark.parametrize("name", sorted(HEADS))
def test_lagged_admission_is_exact_for_argmax_drafts(name: str) -> None:
    requests = pair(HEADS[name], argmax=True)
    for drafts in range(5):
        assert batch_probs(accept_sampled, requests, lagged(drafts)) == plain_probs(requests)


@pytest.mark.parametrize("name", sorted(HEADS))
@pytest.mark.parametrize("costs", [SMOOTH, STAIRS], ids=["smooth", "stairs"])
def test_algorithm_1_is_exact_without_lag(name: str, costs: Costs) -> None:
    requests = pair(HEADS[name])
    assert batch_probs(accept_sampled, requests, stopping(costs)) == plain_probs(requests)


def block_cells_of(
    request: Request, draft: Prefix, length: int
) -> tuple[torch.Tensor, list[Fraction]]:
    """Cells of uniforms for the block rule, for `batch_probs`."""
    return block_cells.cells(request.target, request.drafter, draft, length)


@pytest.mark.parametrize("name", sorted(HEADS))
def test_admission_is_exact_for_windows_judged_as_a_whole(name: str) -> None:
    requests = pair(HEADS[name])
    schedules = [lagged(drafts) for drafts in range(5)] + [stopping(SMOOTH), stopping(STAIRS)]
    for schedule in schedules:
        assert batch_probs(accept_block, requests, schedule, block_cells_of) == plain_probs(
            requests
        )


def test_a_search_over_the_present_step_is_caught_for_windows_judged_as_a_whole() -> None:
    requests = pair(HEADS["distinct"])
    distribution = batch_probs(accept_block, requests, peeking(STAIRS), block_cells_of)
    assert distribution != plain_probs(requests)


def test_algorithm_1_was_really_exercised() -> None:
    """Its K depends on what was drafted; otherwise the test above would show nothing."""
    heads = HEADS["distinct"]
    lengths = set()
    for first in ((0, 0), (1, 0)):
        for second in ((0, 0), (1, 0)):
            drafted = (first, second)
            confidence = np.array(
                [
                    [h(d[: k + 1]) for k in range(GAMMA)]
                    for h, d in zip(heads, drafted, strict=True)
                ],
                np.float32,
            )
            lengths.add(tuple(stopping(SMOOTH)(confidence).tolist()))
    assert len({sum(length) for length in lengths}) > 1


def test_a_search_over_the_present_step_is_caught() -> None:
    """On costs for which Algorithm 1 is exact."""
    requests = pair(HEADS["distinct"])
    assert batch_probs(accept_sampled, requests, peeking(STAIRS)) != plain_probs(requests)


# Appendix A: one request, SPS 1.0, 0.5, 0.45, a_1 = 0.8, and c_2 high behind token 0 alone.


def constant(*shares: int) -> Chain:
    return lambda prefix: tuple(Fraction(s, sum(shares)) for s in shares)


APPENDIX = (Request(constant(7, 3), constant(5, 5), tabled(0.8, {0: 1.0, 1: 0.25})),)
APPENDIX_COSTS = jagged(1.0, 0.5, 0.45)


def first_token(schedule: Schedule) -> tuple[Fraction, Fraction]:
    distribution = batch_probs(accept_sampled, APPENDIX, schedule, grid=10)
    shares = [Fraction(0), Fraction(0)]
    for (text,), mass in distribution.items():
        shares[text[0]] += mass
    return shares[0], shares[1]


def test_appendix_a_leaks_to_85_15_when_the_search_peeks() -> None:
    workspace = Workspace(1, GAMMA)
    leaked = first_token(peeking(APPENDIX_COSTS, workspace))
    assert leaked == (Fraction(85, 100), Fraction(15, 100))
    kept = first_token(stopping(APPENDIX_COSTS, workspace))
    assert kept == (Fraction(7, 10), Fraction(3, 10))
    for drafts in range(3):
        fixed = first_token(
            lambda c, drafts=drafts: admit(gains(c), drafts, workspace)  # type: ignore[misc]
        )
        assert fixed == (Fraction(7, 10), Fraction(3, 10))


# Each of these is one mistake; the distribution must notice.


def sampled_probability(drafts: Prefix) -> float:
    """Future-peeking: the draft probability of x_k itself taken for c_k."""
    return float(DRAFTER(drafts[:-1])[drafts[-1]])


def test_future_peeking_admission_is_caught() -> None:
    requests = pair((sampled_probability, sampled_probability))
    assert batch_probs(accept_sampled, requests, lagged(1)) != plain_probs(requests)


def estimated(drafter: Chain) -> Confidence:
    """The confidence of a drafter without a head, by the distribution that x_k is drawn from."""

    def confidence(drafts: Prefix) -> float:
        logits = torch.tensor([float(share) for share in drafter(drafts[:-1])]).log()
        return float(draft_confidence(logits[None, None]).sigmoid())

    return confidence


ESTIMATED = (estimated(DRAFTER), estimated(OTHER_DRAFTER))


@pytest.mark.parametrize("argmax", [False, True])
def test_confidence_estimated_from_the_draft_is_exact(argmax: bool) -> None:
    """The positive control of the one above: max of p_d(. | x_<k) does not look at x_k."""
    requests = pair(ESTIMATED, argmax=argmax)
    schedules = [lagged(drafts) for drafts in range(5)] + [stopping(SMOOTH), stopping(STAIRS)]
    for schedule in schedules:
        assert batch_probs(accept_sampled, requests, schedule) == plain_probs(requests)


def test_confidence_estimated_from_the_draft_is_exact_for_windows_judged_as_a_whole() -> None:
    requests = pair(ESTIMATED)
    for drafts in range(5):
        assert batch_probs(accept_block, requests, lagged(drafts), block_cells_of) == plain_probs(
            requests
        )


def test_trimming_at_a_drafted_stop_token_is_caught() -> None:
    """Token 1 plays EOS: x_k = 1 is taken out of its own window."""
    trimmed: Confidence = lambda drafts: 0.0 if drafts[-1] == 1 else 0.9  # noqa: E731
    requests = pair((trimmed, trimmed))
    assert batch_probs(accept_sampled, requests, lagged(2)) != plain_probs(requests)


def test_ties_broken_by_drafted_values_are_caught() -> None:
    """Equal survivals, the place goes to the request whose first draft is token 0."""

    def by_value(confidence: np.ndarray) -> np.ndarray:
        # c_2 says which x_1 was drafted; c_1 ties.
        return np.array([1, 0]) if confidence[0, 1] > confidence[1, 1] else np.array([0, 1])

    heads = (tabled(0.5, {0: 0.9, 1: 0.1}), tabled(0.5, {0: 0.8, 1: 0.2}))
    requests = pair(heads)
    assert batch_probs(accept_sampled, requests, by_value) != plain_probs(requests)
    assert batch_probs(accept_sampled, requests, lagged(1)) == plain_probs(requests)


@pytest.mark.parametrize("mutant", [mutants.residual_skipped, mutants.bonus_off_by_one])
def test_wrong_accept_rules_are_caught_under_admission(mutant: object) -> None:
    requests = pair(HEADS["distinct"])
    assert batch_probs(mutant, requests, lagged(2)) != plain_probs(requests)  # type: ignore[arg-type]


def test_argmax_draft_taken_for_sampled_is_caught_under_admission() -> None:
    heads = HEADS["distinct"]
    requests = (
        Request(TARGET, DRAFTER, heads[0], argmax=True, claim_sampled=True),
        Request(OTHER_TARGET, OTHER_DRAFTER, heads[1], argmax=True, claim_sampled=True),
    )
    assert batch_probs(accept_sampled, requests, lagged(2)) != plain_probs(requests)
