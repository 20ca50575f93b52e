"""Reliability numbers: what each AUC says, ECE with floor, and the effect of a table."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.analyses.predictions import Predictions, ece_floor
from sglang_dspark.evaluation.analyses.reliability import compute, reliability
from sglang_dspark.evaluation.calibration_data import observations
from sglang_dspark.schedule.calibration import Calibration, Observations, fit
from tests.evaluation.trace_world import drawn, generation, step, sts_file, trace


def test_pooled_auc_rewards_knowing_the_position() -> None:
    """Confidence that is the same in every step knows nothing but k: within a position it is
    worth 1/2, and pooled it still looks useful."""
    generator = np.random.default_rng(0)
    steps = 3000
    accepted = np.cumprod(generator.uniform(size=(steps, 4)) < 0.7, axis=1).sum(axis=1)
    made = [generation(*(step(int(a), (0.7,) * 4) for a in accepted))]
    part = reliability(trace(made, ["math"], 4), {})["overall"]
    assert part.before.auc.within == pytest.approx(0.5)
    assert part.auc_conditional == pytest.approx(0.5)
    assert part.before.auc.pooled > 0.65
    assert part.before.ece.value < 0.03


def test_a_perfect_oracle_has_auc_one_in_every_reading() -> None:
    sure = generation(step(2, (0.9, 0.9)), step(1, (0.9, 0.1)), step(0, (0.1, 0.1)))
    part = reliability(trace([sure], ["math"], 2), {})["math"]
    assert part.before.auc.pooled == 1.0
    assert part.before.auc.within == 1.0
    assert part.auc_conditional == 1.0
    assert part.after is None


def test_a_table_lowers_the_error_of_overconfidence() -> None:
    loud = drawn(prompts=60, steps=40, scale=3.0)
    table = fit(observations(loud.generations, loud.gamma)).temperatures
    part = reliability(loud, {"after": Calibration(table)})["overall"]
    assert part.after is not None
    assert part.after.ece.value < 0.4 * part.before.ece.value
    assert part.after.brier < part.before.brier
    before = part.before
    assert before.ece.low < before.ece.value < before.ece.high
    assert len(before.ece_by_position) == loud.gamma
    assert sum(row.count for row in before.curve) == before.predictions == 60 * 40 * 4
    # A temperature a position keeps the order within position 1; further on it may not.
    first = [each.auc.by_position[0] for each in (part.before, part.after)]
    assert first[1] == pytest.approx(first[0], abs=1e-5)


def test_floor_is_what_calibrated_predictions_show() -> None:
    """On calibrated data the measured ECE is near the floor, which decreases with more data."""
    small, large = (observations(drawn(prompts=n, steps=40).generations, 4) for n in (6, 96))
    identity = Calibration.identity(4)
    assert ece_floor(large, identity) < 0.5 * ece_floor(small, identity)
    part = reliability(drawn(prompts=96, steps=40), {})["overall"].before
    assert part.ece.value < 2.5 * part.ece_floor


def test_predictions_exclude_what_was_not_verified() -> None:
    data = Observations(np.zeros((2, 2)), np.array([1, 0]), np.array([1, 2]), np.array([0, 1]))
    found = Predictions.of(data, Calibration.identity(2))
    assert found.survival.tolist() == [0.5, 0.5, 0.25]
    assert found.label.tolist() == [1, 0, 0]
    assert found.position.tolist() == [1, 1, 2]
    assert found.request.tolist() == [0, 1, 1]


def test_domains_without_a_step_are_skipped() -> None:
    made = trace([generation(step(1, (0.5, 0.6))), generation()], ["math", "chat"], 2)
    assert list(reliability(made, {})) == ["math", "overall"]


def test_prompts_that_the_table_was_fitted_on_are_skipped() -> None:
    made = drawn(prompts=6)
    digests = tuple(prompt.digest for prompt in made.prompts)
    found = compute("d", made, sts_file(4, fit_prompts=digests[:4]))
    assert found.prompts == 2
    assert found.groups == reliability(made.of_prompts([4, 5]), found.calibrations)
    assert list(found.calibrations) == ["after", "shifted"], "no request is followed: spread 0"
    with pytest.raises(DSparkError, match="fitted on all of these prompts"):
        compute("d", made, sts_file(4, fit_prompts=digests))
    bare = compute("d", made, None)
    assert (bare.prompts, bare.calibrations) == (6, {})
    assert list(bare.groups["overall"].variants()) == ["before"]
