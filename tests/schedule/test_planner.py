"""Budget search, Algorithm 1 and admission against brute force; properties of all three.

Each property sees 10,000 random batches (tests/schedule/properties.py).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.schedule.admission import admit
from sglang_dspark.schedule.budget import Costs, Workspace, early_stop, plain, search
from sglang_dspark.schedule.gains import gains as gains_of
from sglang_dspark.schedule.gains import speed_weights
from sglang_dspark.schedule.survival import survival
from tests.schedule.planner_worlds import (
    admitted_by_sorting,
    all_lengths,
    best_theta,
    prefix_sums,
    random_costs,
    random_gains,
)
from tests.schedule.properties import CASES, EXAMPLES

seeds = st.integers(0, 2**32 - 1)
ROWS, GAMMA = 3, 2  # unequal: one in place of the other fails
LENGTHS = all_lengths(ROWS, GAMMA)


def bounds(rng: np.random.Generator, rows: int, gamma: int) -> tuple[np.ndarray, np.ndarray]:
    limits = np.where(rng.random(rows) < 0.7, gamma, rng.integers(0, gamma + 1, rows))
    floors = np.where(rng.random(rows) < 0.8, 0, rng.integers(0, gamma + 1, rows))
    return limits, np.minimum(floors, limits)


@EXAMPLES
@given(seed=seeds, by_depth=st.booleans(), must_draft=st.booleans())
def test_search_is_the_best_of_everything(seed: int, by_depth: bool, must_draft: bool) -> None:
    """Theta equals brute force over all depths and all sets of prefixes; K gives that Theta."""
    rng = np.random.default_rng(seed)
    workspace = Workspace(ROWS, GAMMA)
    for _ in range(CASES):
        gains = random_gains(rng, ROWS, GAMMA)
        costs = random_costs(rng, ROWS, GAMMA, by_depth=by_depth)
        limits, floors = bounds(rng, ROWS, GAMMA)
        found = search(gains, costs, workspace, limits=limits, floors=floors, must_draft=must_draft)
        expected = best_theta(
            gains, costs, LENGTHS, limits=limits, floors=floors, must_draft=must_draft
        )
        assert found.theta == pytest.approx(expected, rel=1e-12)
        if not found.speculates:
            assert found == plain(ROWS, costs)
            continue
        top = np.minimum(limits, found.depth)
        lengths = admit(gains, found.drafts, workspace, limits=top, floors=floors)
        assert lengths.sum() == found.drafts
        tau = ROWS + prefix_sums(gains)[np.arange(ROWS), lengths].sum()
        assert tau / found.seconds == pytest.approx(found.theta, rel=1e-12)


@EXAMPLES
@given(seed=seeds)
def test_algorithm_1_is_its_definition(seed: int) -> None:
    """Floors, then one draft after the other in descending order, until Theta first drops."""
    rng = np.random.default_rng(seed)
    workspace = Workspace(ROWS, GAMMA)
    for _ in range(CASES):
        gains = random_gains(rng, ROWS, GAMMA)
        costs = random_costs(rng, ROWS, GAMMA, by_depth=True)
        limits, floors = bounds(rng, ROWS, GAMMA)
        depth = int(rng.integers(max(1, limits.max()), GAMMA + 1))
        fixed, base = costs.fixed + costs.draft[depth], float(ROWS + rng.integers(3))
        place = np.arange(GAMMA)
        free = gains[(place >= floors[:, None]) & (place < limits[:, None])].astype(np.float64)
        admitted = int(floors.sum())
        tau = base + gains[place < floors[:, None]].sum(dtype=np.float64)
        for gain in -np.sort(-free):
            now, then = costs.tokens[ROWS + admitted : ROWS + admitted + 2] + fixed
            if (tau + gain) * now < tau * then:
                break
            tau, admitted = tau + gain, admitted + 1
        bounded = {"limits": limits, "floors": floors, "base": base}
        found = early_stop(gains, costs, workspace, **bounded, depth=depth)
        assert (found.drafts, found.depth) == (admitted, depth)
        assert found.seconds == pytest.approx(costs.tokens[ROWS + admitted] + fixed)
        assert found.theta == pytest.approx(tau / found.seconds)
        # What stops early never beats what sees everything.
        most = search(gains, costs, workspace, **bounded, must_draft=True)
        assert found.theta <= most.theta * (1 + 1e-12)


@EXAMPLES
@given(seed=seeds, rows=st.integers(1, 9), gamma=st.integers(1, 8))
def test_admission_is_the_sorted_order(seed: int, rows: int, gamma: int) -> None:
    """Equals a full sort by (floor, gain, position, request): K respected, ties, prefixes."""
    rng = np.random.default_rng(seed)
    workspace = Workspace(rows, gamma)
    for _ in range(CASES):
        gains = random_gains(rng, rows, gamma)
        limits, floors = bounds(rng, rows, gamma)
        drafts = int(rng.integers(0, rows * gamma + 2))
        lengths = admit(gains, drafts, workspace, limits=limits, floors=floors)
        assert lengths.sum() == min(drafts, limits.sum())
        assert (lengths <= limits).all()
        np.testing.assert_array_equal(lengths, admitted_by_sorting(gains, drafts, limits, floors))


@EXAMPLES
@given(seed=seeds)
def test_admission_moves_with_the_requests(seed: int) -> None:
    """Another order of the requests permutes the lengths, where no tie spans two requests."""
    rng = np.random.default_rng(seed)
    workspace = Workspace(16, 5)
    for _ in range(CASES):
        gains = gains_of(rng.random((16, 5)).astype(np.float32))
        drafts = int(rng.integers(0, 81))
        order = rng.permutation(16)
        lengths = admit(gains, drafts, workspace)
        moved = admit(np.ascontiguousarray(gains[order]), drafts, workspace)
        if len(np.unique(gains)) == gains.size:
            np.testing.assert_array_equal(moved, lengths[order])
        ones = np.ones_like(gains)  # all tied: only the place decides, so nothing moves
        expected = drafts // 16 + (np.arange(16) < drafts % 16)
        np.testing.assert_array_equal(admit(ones, drafts, workspace), expected)


@EXAMPLES
@given(seed=seeds)
def test_admission_does_not_see_what_it_does_not_admit(seed: int) -> None:
    """Non-anticipation: a request's length is settled by what its admitted drafts revealed.

    a_{r,j+1} is known only once x_{r,j} is. So changing everything behind the first draft that was
    not admitted, which depends on drafts that were not admitted, must not change any length.
    """
    rng = np.random.default_rng(seed)
    workspace = Workspace(6, 5)
    for _ in range(CASES):
        gains = random_gains(rng, 6, 5)
        drafts = int(rng.integers(0, 31))
        lengths = admit(gains, drafts, workspace)
        other = gains.copy()
        for r, length in enumerate(lengths):
            tail = slice(length + 1, None)
            other[r, tail] = np.minimum(random_gains(rng, 1, 5)[0, tail], gains[r, min(length, 4)])
            other[r] = np.minimum.accumulate(other[r])
        np.testing.assert_array_equal(admit(other, drafts, workspace), lengths)
        costs = random_costs(rng, 6, 5, by_depth=False)
        limits, floors = bounds(rng, 6, 5)
        bounded = {"limits": limits, "floors": floors}
        stop = early_stop(gains, costs, workspace, **bounded).drafts
        lengths = admit(gains, stop, workspace, **bounded)
        assert (lengths >= floors).all()
        assert lengths.sum() == stop
        for r, length in enumerate(lengths):
            gains[r, length + 1 :] = 0.0
        assert early_stop(gains, costs, workspace, **bounded).drafts == stop


@EXAMPLES
@given(seed=seeds)
def test_more_budget_or_more_survival_never_shortens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    workspace = Workspace(8, 4)
    for _ in range(CASES):
        gains = random_gains(rng, 8, 4)
        drafts = int(rng.integers(0, 33))
        lengths = admit(gains, drafts, workspace)
        assert (admit(gains, drafts + 1, workspace) >= lengths).all()
        r = int(rng.integers(8))
        raised = gains.copy()
        raised[r] = np.sqrt(raised[r])  # of one request alone
        assert admit(raised, drafts, workspace)[r] >= lengths[r]


@EXAMPLES
@given(seed=seeds, gamma=st.integers(1, 16))
def test_gains_are_survivals_and_never_increase(seed: int, gamma: int) -> None:
    """The compiled product equals the one in torch bitwise, for any confidences."""
    rng = np.random.default_rng(seed)
    confidence = (1 - rng.random((100, gamma)) * rng.choice([1e-7, 1e-3, 1.0])).astype(np.float32)
    confidence = np.clip(confidence, 0, 1)
    compiled = gains_of(confidence)
    assert (np.diff(compiled, axis=1) <= 0).all()
    assert np.array_equal(compiled, survival(torch.from_numpy(confidence)).numpy())
    weighted = gains_of(confidence, rng.random(100).astype(np.float32) * 4)
    assert (np.diff(weighted, axis=1) <= 0).all()


@EXAMPLES
@given(seed=seeds, rows=st.integers(1, 9), gamma=st.integers(1, 8))
def test_admission_is_prefix_closed_and_keeps_k_for_any_bits(
    seed: int, rows: int, gamma: int
) -> None:
    """NaN, infinities, negative zeros, rising rows: the admitted drafts are the first of each row.

    Any value of a row counts as its running minimum, so no draft is admitted before the one in
    front of it.
    """
    rng = np.random.default_rng(seed)
    workspace = Workspace(rows, gamma)
    for _ in range(CASES):
        bits = rng.integers(0, 2**32, (rows, gamma), dtype=np.uint32)
        drafts = int(rng.integers(0, rows * gamma + 1))
        lengths = admit(bits.view(np.float32), drafts, workspace)
        assert lengths.sum() == drafts
        falling = np.where(bits > 0x7F800000, 0, bits).astype(np.uint32)
        falling = np.minimum.accumulate(falling, axis=1).view(np.float32)
        inside = np.arange(gamma) < lengths[:, None]
        left_out = falling[~inside].max(initial=0.0)
        assert falling[inside].min(initial=np.inf) >= left_out
        np.testing.assert_array_equal(admit(falling, drafts, workspace), lengths)


def test_skipping_and_depth() -> None:
    """A slow draft is skipped; a draft that is slow by depth is cut where it stops paying."""
    gains = gains_of(np.full((4, 5), 0.8, np.float32))
    workspace = Workspace(4, 5)
    flat = np.full(25, 1.0)
    deep = search(gains, Costs(flat, 0.0, np.r_[0.0, np.full(5, 0.1)]), workspace)
    assert (deep.drafts, deep.depth) == (20, 5)
    slow = search(gains, Costs(flat, 0.0, np.r_[0.0, np.full(5, 9.0)]), workspace)
    assert not slow.speculates
    assert slow.drafts == 0
    cut = search(gains, Costs(flat, 0.0, np.r_[0.0, 0.1, 0.2, 5.0, 6.0, 7.0]), workspace)
    assert (cut.drafts, cut.depth) == (8, 2)
    saved = search(gains, Costs(flat, 0.0, np.r_[-0.9, np.full(5, 0.0)]), workspace)
    assert saved.depth == 0  # a plain step that is far cheaper than verifying anchors


def test_depths_of_equal_cost_are_offered_once() -> None:
    """Drafts go deeper if that costs nothing, for the confidences of later positions."""
    gains = gains_of(np.full((4, 5), 0.8, np.float32))
    costs = Costs(np.full(25, 1.0), 0.0, np.r_[0.0, np.full(5, 0.1)])
    found = search(gains, costs, Workspace(4, 5), limits=np.ones(4, np.int64))
    assert (found.drafts, found.depth) == (4, 5)


def test_staircase_is_filled_to_its_tier() -> None:
    """Tiers of 8 tokens: K fills the tier, where a lookup at the probe below would stop or jump."""
    gains = gains_of(np.full((6, 3), 0.5, np.float32))
    tokens = 1.0 + np.ceil(np.arange(25) / 8) * 2.0
    found = search(gains, Costs(tokens, 0.0, np.zeros(4)), Workspace(6, 3))
    assert 6 + found.drafts == 8


def test_speed_weights() -> None:
    weights = speed_weights(
        np.array([10, 20, 40, 0], np.float32), np.array([40, 20, 20, 30], np.float32), most=3.0
    )
    assert weights.tolist() == [3.0, 1.0, 1.0, 1.0]
    gains = gains_of(np.full((2, 3), 0.5, np.float32), np.array([1, 3], np.float32))
    lengths = admit(gains, 3, Workspace(2, 3))
    assert lengths.tolist() == [1, 2]  # 1.5, .75 and .375 against .5, .25


def test_mistakes_are_named() -> None:
    workspace = Workspace(2, 3)
    gains = np.ones((2, 3), np.float32)
    short = Costs(np.ones(8), 0.0, np.zeros(4))
    with pytest.raises(ValueError, match="do not cover"):
        search(gains, short, workspace)
    with pytest.raises(ValueError, match="do not cover"):
        early_stop(gains, short, workspace)
    enough = Costs(np.ones(9), 0.0, np.zeros(4))
    for depth in (0, 4):
        with pytest.raises(ValueError, match=f"draft of {depth} positions, gamma is 3"):
            early_stop(gains, enough, workspace, depth=depth)
    with pytest.raises(ValueError, match="contiguous float32"):
        admit(gains.astype(np.float64), 1, workspace)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[1\.\.2, 3\]"):
        admit(np.ones((3, 3), np.float32), 1, workspace)
    with pytest.raises(ValueError, match="-1 drafts"):
        admit(gains, -1, workspace)
    with pytest.raises(ValueError, match="without NaN"):
        gains_of(np.array([[1.5]], np.float32))
    with pytest.raises(ValueError, match="without NaN"):
        gains_of(np.array([[np.nan]], np.float32))
    with pytest.raises(ValueError, match="workspace"):
        Workspace(0, 3)
