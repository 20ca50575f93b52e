"""Statistics against hand counts and brute force."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dspark.evaluation.records import Generation, Step
from sglang_dspark.evaluation.report import (
    OVERALL,
    agreement,
    engine_report,
    metrics,
    served_report,
)
from sglang_dspark.evaluation.statistics import (
    ConfidencePairs,
    RequestCounts,
    acceptance,
    bootstrap_ratio,
    relative_difference,
)


def _step(accepted: int, confidence: tuple[float, ...], verify_len: int, kept: int) -> Step:
    return Step(5, (1,) * len(confidence), verify_len, accepted, kept, confidence)


def _generation(*steps: Step) -> Generation:
    made = 1 + sum(step.kept for step in steps)
    return Generation(4, tuple(range(made)), "length", steps)


def test_tau_and_accept_length_by_hand() -> None:
    """Two steps accept 2 and 0 of 2 drafts; the limit cuts the third's 3 tokens to 1."""
    c = (0.5, 0.5)
    generation = _generation(_step(2, c, 2, 3), _step(0, c, 2, 1), _step(2, c, 2, 1))
    a = acceptance([RequestCounts.from_generation(generation, 2)])
    assert a.steps == 3
    assert a.tokens == 6
    assert a.tau == pytest.approx((3 + 1 + 3) / 3)
    assert a.accept_length == pytest.approx(6 / 3)


def test_acceptance_by_position_by_hand() -> None:
    """Of 10 steps, 4 accept nothing, 3 one draft, 1 two, 2 all three."""
    a = acceptance([RequestCounts(20, (4, 3, 1, 2))])
    assert a.cumulative == pytest.approx((0.6, 0.3, 0.2))
    assert a.conditional == pytest.approx((0.6, 0.5, 2 / 3))
    assert a.tau == pytest.approx(1 + 0.6 + 0.3 + 0.2)


def test_position_that_nothing_reached_is_nan() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a = acceptance([RequestCounts(5, (4, 0, 0))])
    assert a.cumulative == (0.0, 0.0)
    assert a.conditional[0] == 0.0
    assert math.isnan(a.conditional[1])


def test_requests_without_a_step_count_nowhere() -> None:
    counted = RequestCounts(20, (4, 3, 1, 2))
    assert acceptance([counted, RequestCounts(1, (0, 0, 0, 0))]) == acceptance([counted])
    with pytest.raises(ValueError, match="no request"):
        acceptance([RequestCounts(1, (0, 0))])
    with pytest.raises(ValueError, match="different gamma"):
        acceptance([RequestCounts(3, (1, 1)), counted])


@settings(max_examples=50, deadline=None)
@given(histograms=st.lists(st.tuples(*[st.integers(0, 9)] * 4).filter(any), min_size=1, max_size=5))
def test_tau_is_one_plus_the_sum_of_cumulative_acceptance(
    histograms: list[tuple[int, ...]],
) -> None:
    a = acceptance([RequestCounts(9, histogram) for histogram in histograms])
    assert a.tau == pytest.approx(1 + sum(a.cumulative))
    assert a.tau_low <= a.tau + 1e-9
    assert a.tau_high >= a.tau - 1e-9 or len(histograms) > 1
    reached = [c for c in a.conditional if not math.isnan(c)]
    assert np.prod(reached) == pytest.approx(a.cumulative[len(reached) - 1])


def test_bootstrap_interval_covers_and_narrows() -> None:
    """About 95 of 100 intervals hold the true ratio; four times the prompts halve the width."""
    generator = np.random.default_rng(0)
    covered, widths = 0, []
    for n in (40, 160):
        for trial in range(100):
            steps = generator.integers(20, 60, n).astype(float)
            tokens = steps * generator.gamma(9.0, 0.2, n)  # mean 1.8
            low, high = bootstrap_ratio(tokens, steps, draws=400, seed=trial)
            covered += low <= 1.8 <= high
            widths.append(high - low)
    assert 180 <= covered <= 199
    assert np.mean(widths[:100]) / np.mean(widths[100:]) == pytest.approx(2, rel=0.1)


def test_bootstrap_is_deterministic() -> None:
    values = np.array([3.0, 5.0, 8.0]), np.array([2.0, 3.0, 4.0])
    assert bootstrap_ratio(*values, seed=1) == bootstrap_ratio(*values, seed=1)
    assert bootstrap_ratio(values[0][:1], values[1][:1]) == (1.5, 1.5)


def test_drafts_behind_the_verify_length_are_censored() -> None:
    steps = (
        _step(1, (0.9, 0.5, 0.4), 1, 2),  # stopped by its window: drafts 2, 3 unknown
        _step(1, (0.8, 0.5, 0.5), 3, 2),  # draft 2 rejected: 2 and 3 are failures
        _step(0, (0.7, 0.5, 0.5), 0, 1),  # nothing admitted
    )
    pairs = ConfidencePairs.from_generations([_generation(*steps)])
    assert pairs.survival.tolist() == pytest.approx([0.9, 0.8, 0.4, 0.2])
    assert pairs.accepted.tolist() == [True, True, False, False]
    assert pairs.position.tolist() == [1, 1, 2, 3]


def _pairs(survival: list[float], accepted: list[bool]) -> ConfidencePairs:
    return ConfidencePairs(
        np.array(survival), np.array(accepted, dtype=bool), np.ones(len(accepted), dtype=np.int64)
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.35, 0.5, 0.9, 1.0]), st.booleans()), min_size=1)
)
def test_auc_is_the_chance_that_a_success_outranks_a_failure(
    rows: list[tuple[float, bool]],
) -> None:
    pairs = _pairs([a for a, _ in rows], [y for _, y in rows])
    good = [a for a, y in rows if y]
    bad = [a for a, y in rows if not y]
    if not good or not bad:
        assert math.isnan(pairs.auc())
        return
    wins = [1.0 if g > b else 0.5 if g == b else 0.0 for g, b in itertools.product(good, bad)]
    assert pairs.auc() == pytest.approx(sum(wins) / len(wins))


def test_ece_by_hand() -> None:
    """Bin 0.8-0.9: mean 0.85 against 1/2. Bin 0.1-0.2: mean 0.1 against 0. Last bin holds 1.0."""
    pairs = _pairs([0.8, 0.89, 0.1, 1.0], [True, False, False, True])
    expected = (abs(0.8 + 0.89 - 1) + 0.1 + 0.0) / 4
    assert pairs.ece() == pytest.approx(expected)
    assert math.isnan(_pairs([], []).ece())


def test_ece_has_ten_bins() -> None:
    """0.99 and 0.9 share the last of ten bins; of nine 0.895 is in it too, of eleven 0.9 is not."""
    told = np.array([0.99, 0.9, 0.895])
    pairs = ConfidencePairs(told, np.array([True, False, True]), np.ones(3, np.int64))
    assert pairs.ece() == pytest.approx((0.89 + 0.105) / 3)
    assert pairs.ece(9) == pytest.approx(0.785 / 3)
    assert pairs.ece(11) == pytest.approx((0.01 + 0.795) / 3)


def test_ece_of_calibrated_confidence_is_small_and_of_overconfidence_is_not() -> None:
    generator = np.random.default_rng(0)
    survival = generator.uniform(size=20_000)
    accepted = generator.uniform(size=20_000) < survival
    honest = _pairs(survival.tolist(), accepted.tolist())
    boastful = _pairs(np.sqrt(survival).tolist(), accepted.tolist())
    assert honest.ece() < 0.015
    assert boastful.ece() == pytest.approx(1 / 6, abs=0.02)  # mean of sqrt(u) - u
    assert honest.auc() == pytest.approx(5 / 6, abs=0.01)


def test_report_by_domain() -> None:
    c = (0.9, 0.2)
    math_one, code_one = _generation(_step(2, c, 2, 3)), _generation(_step(0, c, 2, 1))
    ended_at_once = _generation()
    report = engine_report(["math", "code", "chat"], [math_one, code_one, ended_at_once], 2)
    assert list(report) == ["math", "code", OVERALL]
    values = metrics(report)
    assert values["tau"] == {"math": 3.0, "code": 1.0, "overall": 2.0, "macro": 2.0}
    assert values["by_domain"]["math"]["cumulative"] == (1.0, 1.0)
    assert math.isnan(values["auc"]["math"])
    # math accepts at survival 0.9 and 0.18, code rejects at the same: 2 ties, 1 win, 1 loss.
    assert values["auc"]["overall"] == 0.5


def test_relative_difference_is_in_percent() -> None:
    assert relative_difference(1.03, 1.0) == pytest.approx(3.0)
    assert relative_difference(1.0, 2.0) == pytest.approx(-50.0)


def test_agreement_of_engine_and_server() -> None:
    """The server accepts 21 drafts in 20 steps where the engine accepted 20, one output differs."""
    engine = served_report(
        ["math", "math"], [RequestCounts(20, (2, 6, 2)), RequestCounts(21, (0, 10, 0))]
    )
    served = served_report(
        ["math", "math"], [RequestCounts(20, (2, 6, 2)), RequestCounts(22, (0, 9, 1))]
    )
    tokens = [[1, 2], [3, 4]]
    compared = agreement(engine, served, tokens, [(1, 2), (3, 5)], greedy=True)
    assert compared.tau_percent == pytest.approx(100 * (41 / 40 - 1))
    assert compared.accept_length_percent == pytest.approx(100 * (42 / 41 - 1))
    assert (compared.equal, compared.prompts) == (1, 2)
    assert agreement(engine, served, tokens, tokens, greedy=False).equal is None
