"""The analyses against counts by hand, brute force, and what intervals must do."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats  # type: ignore[import-untyped]

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.analyses import positions, series, tau, thresholds, trainings
from sglang_dspark.evaluation.resampling import Estimate, Resampler, estimate
from sglang_dspark.evaluation.statistics import RequestCounts, acceptance
from sglang_dspark.evaluation.traces import Trace
from sglang_dspark.schedule.calibration import Calibration
from tests.evaluation.trace_world import drawn, generation, step, thrice, trace


def _with_accepted(base: Trace, change: int) -> Trace:
    """The same prompts and steps with `change` more accepted drafts where there is room."""
    made = []
    for each in base.generations:
        moved = (
            step(int(np.clip(s.accepted + change, 0, base.gamma)), s.confidence) for s in each.steps
        )
        made.append(generation(*moved))
    return trace(made, base.domains, base.gamma)


def test_table_by_hand() -> None:
    """math: 3 steps yield 3 + 1 + 2 tokens, chat: 1 step yields 1; the other drafter has 1 each."""
    c = (0.5, 0.5)
    ours = [generation(step(2, c), step(0, c), step(1, c)), generation(step(0, c))]
    theirs = [generation(step(0, c), step(0, c)), generation(step(0, c))]
    found = tau.compute(
        {"a": trace(ours, ["math", "chat"], 2), "b": trace(theirs, ["math", "chat"], 2)}
    )
    assert found.tau["a"] == {"math": 2.0, "chat": 1.0, "macro": 1.5}
    assert found.tau["b"] == {"math": 1.0, "chat": 1.0, "macro": 1.0}
    assert found.ratio["a/b"]["macro"].value == 1.5
    assert found.prompts == {"math": 1, "chat": 1}
    assert found.interval["a"]["math"] == (2.0, 2.0), "one prompt has no spread"


def test_windows_that_a_replayed_answer_cut_are_skipped() -> None:
    """Of 3 steps one verified 1 draft of 2 and says nothing of a whole window."""
    steps = generation(step(2, (0.5, 0.5)), step(0, (0.5, 0.5)), step(1, (0.5, 0.5), 1))
    found = tau.compute({"a": trace([steps], ["math"], 2)})
    assert found.tau["a"]["math"] == 2.0


def test_paired_ratio_knows_what_the_difference_of_intervals_does_not() -> None:
    """A drafter that is better on every prompt: the ratio is known better than either tau."""
    base = drawn(prompts=40, steps=15)
    found = tau.compute({"better": _with_accepted(base, 1), "base": base})
    ratio = found.ratio["better/base"]["macro"]
    assert ratio.low < ratio.value < ratio.high
    assert ratio.low > 1.1
    low, high = found.interval["base"]["macro"]
    assert (ratio.high - ratio.low) / ratio.value < (high - low) / found.tau["base"]["macro"]
    same = tau.compute({"x": base, "y": base}).ratio["x/y"]["macro"]
    assert same == Estimate(1.0, 1.0, 1.0)


def test_trainings_of_two_recipes_are_paired_in_order() -> None:
    """Against scipy's t interval of the log ratios, and against `tau` of each pair."""
    a, b = drawn(prompts=8), drawn(prompts=8, layers=1, sha256="ef" * 32)
    trained = thrice(a=a, b=_with_accepted(b, -1))
    found = trainings.compute(trained).ratio["a/b"]["macro"]
    pairs = [
        tau.compute({"a": ours, "b": theirs}).ratio["a/b"]["macro"].value
        for (_, ours), (_, theirs) in zip(trained[:3], trained[3:], strict=True)
    ]
    assert found.each == pytest.approx(pairs)
    assert len(set(pairs)) == 3
    logs = np.log(pairs)
    low, high = stats.t.interval(0.95, 2, loc=logs.mean(), scale=stats.sem(logs))
    assert found.by_trainings.value == pytest.approx(math.exp(logs.mean()))
    assert found.by_trainings.low == pytest.approx(math.exp(low))
    assert found.by_trainings.high == pytest.approx(math.exp(high))
    assert found.by_prompts.value == pytest.approx(found.by_trainings.value)
    assert found.by_prompts.low < found.by_prompts.value < found.by_prompts.high


def test_equal_trainings_spread_over_prompts_alone() -> None:
    """Three trainings with the same steps: no variance of training, that of prompts as in `tau`."""
    base = drawn(prompts=20)
    same = [replace(base, drafter=replace(base.drafter, sha256=f"{i}" * 64)) for i in range(3)]
    found = trainings.compute([("a", each) for each in same]).tau["a"]["macro"]
    once = tau.compute({"a": base})
    assert found.by_trainings == Estimate(*[pytest.approx(once.tau["a"]["macro"])] * 3)
    low, high = once.interval["a"]["macro"]
    assert (found.by_prompts.low, found.by_prompts.high) == (
        pytest.approx(low),
        pytest.approx(high),
    )


def test_trainings_refuse_too_few_and_the_same_one_twice() -> None:
    trained = thrice(a=drawn(prompts=4), b=drawn(prompts=4, sha256="ef" * 32))
    with pytest.raises(DSparkError, match="found a 3, b 2"):
        trainings.compute(trained[:5])
    with pytest.raises(DSparkError, match="3 or more, found a 2"):
        trainings.compute(trained[:2])
    with pytest.raises(DSparkError, match="the same drafter"):
        trainings.compute([*trained[:2], trained[0]])


def test_table_refuses_different_traces_and_empty_domains() -> None:
    with pytest.raises(DSparkError, match="other prompts"):
        tau.compute({"a": drawn(prompts=4), "b": drawn(prompts=6)})
    ended = trace([generation(step(1, (0.5,))), generation()], ["math", "chat"], 1)
    with pytest.raises(DSparkError, match="no verify step in chat"):
        tau.compute({"a": ended})


def test_intervals_cover_the_truth() -> None:
    """About 95 of 100 intervals of the macro average hold the true value."""
    generator = np.random.default_rng(1)
    domains = ["a"] * 30 + ["b"] * 30
    covered = 0
    for trial in range(100):
        steps = generator.integers(20, 60, 60).astype(float)
        mean = np.where(np.arange(60) < 30, 1.5, 3.0)
        drawn_values = Resampler(domains, draws=400, seed=trial).ratios(
            steps * mean * generator.gamma(16.0, 1 / 16, 60), steps
        )
        found = estimate(drawn_values["macro"])
        covered += found.low <= 2.25 <= found.high
    assert 88 <= covered <= 99


def test_positions_agree_with_the_plain_statistics() -> None:
    made = drawn()
    found = positions.compute({"d": made})
    curve, cumulative = (of["d"]["overall"] for of in (found.curves, found.cumulative))
    counts = [RequestCounts.from_generation(each, made.gamma) for each in made.generations]
    expected = acceptance(counts)
    assert [point.value for point in curve] == pytest.approx(expected.conditional)
    assert [point.value for point in cumulative] == pytest.approx(expected.cumulative)
    assert curve[0].reached == expected.steps == cumulative[-1].reached
    assert all(point.low <= point.value <= point.high for point in curve)


def test_positions_exclude_what_was_not_verified() -> None:
    """Of two steps that accepted draft 1, one did not verify draft 2: 1 of 1, not 1 of 2."""
    c = (0.5, 0.5)
    made = trace([generation(step(1, c, 1), step(2, c, 2))], ["math"], 2)
    curve = positions.compute({"d": made}).curves["d"]["math"]
    assert [point.value for point in curve] == [1.0, 1.0]
    assert [point.reached for point in curve] == [2, 1]


def test_series_are_sorted_and_labelled() -> None:
    shallow, deep = drawn(layers=1), drawn(layers=5)
    found = series.compute(
        series.DepthResult, [("dspark", deep), ("dspark", shallow), ("dflash", deep)]
    )
    assert [point.x for point in found.curves["dspark"]] == [1, 5]
    assert [point.x for point in found.curves["dflash"]] == [5]
    by_length = series.compute(
        series.LengthResult, [("rnn", drawn(gamma=6)), ("rnn", drawn(gamma=3))]
    )
    assert [point.x for point in by_length.curves["rnn"]] == [3, 6]


@pytest.mark.parametrize("rule", ["survival", "conditional"])
def test_thresholds_agree_with_admitting_one_draft_after_another(rule: thresholds.Rule) -> None:
    made = drawn(prompts=4, steps=15)
    found = thresholds.compute({"d": made}, rule=rule, points=10)
    for i, t in enumerate(found.thresholds):
        accepted = offered = steps = 0
        for s in (s for each in made.generations for s in each.steps):
            alive, admitted = 1.0, 0
            for c in s.confidence:
                alive = alive * c if rule == "survival" else c
                if alive <= t:
                    break
                admitted += 1
            accepted += min(s.accepted, admitted)
            offered += admitted
            steps += 1
        curve = found.curves["d"]["overall"]
        if offered:
            assert curve.acceptance_rate[i].value == pytest.approx(accepted / offered)
        assert curve.tau[i].value == pytest.approx(1 + accepted / steps)
        assert curve.admitted_share[i] == pytest.approx(offered / steps / made.gamma)


def test_a_higher_threshold_accepts_more_of_less() -> None:
    curve = thresholds.compute({"d": drawn(prompts=30, steps=30)}).curves["d"]["overall"]
    assert curve.tau[0].value > curve.tau[-1].value
    rates = [point.value for point in curve.acceptance_rate]
    assert rates[45] > 0.85 > 0.6 > rates[0]
    assert curve.admitted_share[0] == 1.0


def test_thresholds_take_a_calibration_table() -> None:
    """Twice too confident logits with temperature 2 admit as calibrated ones do."""
    honest, loud = drawn(scale=1.0), drawn(scale=2.0)
    table = {"d": Calibration((2.0,) * 4)}
    calm = thresholds.compute({"d": loud}, calibrations=table)
    assert calm.calibrated == ("d",)
    plain = thresholds.compute({"d": honest}).curves["d"]["overall"].admitted_share
    assert calm.curves["d"]["overall"].admitted_share == pytest.approx(plain, abs=1e-3)


def test_thresholds_refuse_uninformative_traces() -> None:
    with pytest.raises(DSparkError, match="no confidence"):
        thresholds.compute({"d": trace([generation(step(0, (1.0,)))], ["math"], 1)})
    cut = trace([generation(step(0, (0.5, 0.5), 1))], ["math"], 2)
    with pytest.raises(DSparkError, match="shortened verify windows"):
        thresholds.compute({"d": cut})
