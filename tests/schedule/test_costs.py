"""Step times: curves, files, and a model that follows the machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dspark.errors import DSparkError
from sglang_dspark.schedule.cost_model import CostModel, Step, UpdateConfig
from sglang_dspark.schedule.cost_table import (
    CostTable,
    ProfileKey,
    cache_path,
    draft_row,
    load,
    monotone,
    save,
    tokens_curve,
)

KEY = ProfileKey("m", "d", "bfloat16", "cpu", "tp1", "dspark", "0.5.23", 2)
TABLE = CostTable(
    key=KEY,
    knots=(1, 4, 8, 16),
    seconds=(1.0, 1.2, 2.0, 3.0),
    padded=True,
    per_request=0.01,
    per_context=1e-5,
    draft_requests=(1, 4),
    draft_seconds=((0.0, 0.1, 0.2), (-0.05, 0.4, 0.5)),
)


def test_a_batch_costs_its_tier() -> None:
    curve = tokens_curve(TABLE.knots, np.array(TABLE.seconds), True, 20)
    assert curve[[1, 2, 4, 5, 8, 9, 16]].tolist() == [1.0, 1.2, 1.2, 2.0, 2.0, 3.0, 3.0]
    assert curve[20] == pytest.approx(3.0 + 4 / 8)  # no tier: on with the upper half's slope
    linear = tokens_curve(TABLE.knots, np.array(TABLE.seconds), False, 16)
    assert linear[6] == pytest.approx(1.6)
    assert (np.diff(linear) >= 0).all()


def test_beyond_two_tiers_their_own_slope_goes_on() -> None:
    for padded in (True, False):
        curve = tokens_curve((2, 4), np.array([1.0, 1.5]), padded, 6)
        assert curve[4:].tolist() == [1.5, 1.75, 2.0]
        assert tokens_curve((2,), np.array([1.0]), padded, 4).tolist() == [1.0] * 5
        falling = tokens_curve((2, 4), np.array([1.5, 1.0]), padded, 6)
        assert falling[4:].tolist() == [1.0] * 3, "no batch gets cheaper by growing"


def test_skipping_the_draft_saves_less_than_a_step() -> None:
    rows = ((-0.9, 0.1, 0.2), (-0.05, 0.4, 0.5))
    assert replace(TABLE, draft_seconds=rows).draft_seconds[0][0] == -0.9
    with pytest.raises(ValueError, match=r"-0\.91"):
        replace(TABLE, draft_seconds=((-0.91, 0.1, 0.2), rows[1]))


def test_draft_cost_is_linear_between_request_counts() -> None:
    assert draft_row(TABLE, 2) == pytest.approx([-0.05 / 3, 0.2, 0.3])
    assert draft_row(TABLE, 9) == pytest.approx([-0.05, 0.4, 0.5])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=12))
def test_monotone_is_the_nearest_non_decreasing(values: list[float]) -> None:
    fitted = monotone(np.array(values))
    assert (np.diff(fitted) >= -1e-12).all()
    assert fitted.sum() == pytest.approx(sum(values))  # pools keep their means
    loss = ((fitted - values) ** 2).sum()
    for other in (np.maximum.accumulate(values), np.full(len(values), np.mean(values))):
        assert loss <= ((other - values) ** 2).sum() + 1e-9


def test_files_round_trip_and_other_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "costs.json"
    save(TABLE, path)
    assert load(path, KEY) == TABLE
    assert [p.name for p in path.parent.iterdir()] == ["costs.json"]
    with pytest.raises(DSparkError, match=r"dtype: 'bfloat16', not 'float32'"):
        load(path, replace(KEY, dtype="float32"))
    assert cache_path(KEY) != cache_path(replace(KEY, versions="0.5.24"))


@pytest.mark.parametrize("damage", ["cut", "format", "field", "number", "shape", "flag"])
def test_damaged_files_are_one_clear_line(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "costs.json"
    save(TABLE, path)
    text = path.read_text()
    document = json.loads(text)
    if damage == "format":
        document["format"] = 99
    elif damage == "field":
        document["extra"] = 1
    elif damage == "number":
        document["seconds"][0] = -1.0
    elif damage == "shape":
        document["seconds"].pop()
    elif damage == "flag":
        document["padded"] = "no"
    path.write_text(text[:50] if damage == "cut" else json.dumps(document))
    with pytest.raises(DSparkError, match="a new measurement replaces it"):
        load(path, KEY)


def test_unreadable_and_unwritable_places(tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match="cannot read the table of step times"):
        load(tmp_path / "none.json", KEY)
    (tmp_path / "file").write_text("")
    with pytest.raises(DSparkError, match="cannot write step times"):
        save(TABLE, tmp_path / "file" / "costs.json")


def test_costs_add_requests_and_context() -> None:
    model = CostModel(TABLE, max_requests=4)
    costs = model.costs(3, context=1000)
    assert costs.fixed == pytest.approx(0.03)
    step = Step(requests=3, tokens=5, context=1200, depth=2)
    context = 5 * 400 * 1e-5  # each of the five rows sees the mean context
    assert model.predict(step) == pytest.approx(
        2.0 + 0.03 + context + float(draft_row(TABLE, 3)[2])
    )
    plain = Step(requests=3, tokens=3, context=1200, depth=0)
    without = Step(requests=3, tokens=3, context=0, depth=0)
    more = model.predict(plain) - model.predict(without)
    assert more == pytest.approx(3 * 400 * 1e-5)
    with pytest.raises(ValueError, match="5 requests"):
        model.costs(5, 0)


@pytest.mark.parametrize("padded", [True, False])
def test_the_model_follows_a_machine_that_changes(padded: bool) -> None:
    """Wrong by up to 40% at the start, one tier slower half-way, outliers: error stays small."""
    rng = np.random.default_rng(0)
    model = CostModel(replace(TABLE, padded=padded), max_requests=4)
    true = np.array([1.4, 1.5, 2.4, 3.4])
    errors = []
    for t in range(3000):
        if t == 1500:
            true = true * np.array([1.0, 1.0, 1.0, 1.3])
        requests = int(rng.integers(1, 5))
        depth = int(rng.integers(0, 3))
        tokens = requests * (1 + depth)
        curve = tokens_curve(TABLE.knots, true, padded, 12)
        seconds = curve[tokens] + 0.01 * requests + 0.9 * draft_row(TABLE, requests)[depth]
        step = Step(requests, tokens, 0, depth)
        errors.append(abs(model.predict(step) / seconds - 1))
        glitch = 10.0 if rng.random() < 0.02 else 1.0
        model.observe(step, float(seconds * np.exp(0.03 * rng.standard_normal())) * glitch)
    assert np.median(errors[1000:1500]) < 0.02
    assert np.median(errors[2500:]) < 0.02
    assert max(errors[1400:1500]) < 0.1
    assert model.median_error() < 0.1
    assert 20 < model.outliers < 120


def test_numbers_of_rows_that_were_timed_cost_what_they_did() -> None:
    """Six rows may be faster than four; a drop between points far apart is noise."""
    timed = (1.1, 1.0, 1.3, 1.2, 2.0, 1.8)
    table = replace(TABLE, padded=False, knots=(1, 2, 3, 4, 8, 12), seconds=timed)
    curve = CostModel(table, max_requests=4).costs(4, 0).tokens
    assert curve[[1, 2, 3, 4]].tolist() == pytest.approx(timed[:4])
    assert curve[[8, 12]].tolist() == pytest.approx([1.9, 1.9])
    falling = replace(table, seconds=(1.1, 1.0, 1.3, 1.4, 1.2, 1.8))
    curve = CostModel(falling, max_requests=4).costs(4, 0).tokens
    assert curve[[3, 4, 6, 8, 12]].tolist() == pytest.approx([1.3, 1.3, 1.3, 1.3, 1.8])
    every = replace(table, knots=(1, 2, 3, 4, 5, 6), seconds=timed)
    assert CostModel(every, 2).costs(2, 0).tokens[1:].tolist() == pytest.approx(timed)


def test_a_number_of_rows_is_corrected_by_its_own_steps() -> None:
    """The fastest one keeps its lead where it is timed again and again as it was."""
    timed = (1.06, 0.98, 0.95, 1.11, 0.99, 0.93)
    table = replace(TABLE, padded=False, knots=(1, 2, 3, 4, 5, 6), seconds=timed, per_request=0.0)
    model = CostModel(table, 2)
    for _ in range(400):
        for tokens in (4, 6):
            model.observe(Step(2, tokens, 0, 0), 1.2 * timed[tokens - 1] - 0.05 / 3)
    found = [model.predict(Step(2, tokens, 0, 0)) + 0.05 / 3 for tokens in (4, 6)]
    assert found == pytest.approx([1.2 * timed[3], 1.2 * timed[5]], rel=0.01)
    assert model.costs(2, 0).tokens[5] > model.costs(2, 0).tokens[6]


def test_a_rule_that_stops_at_a_rise_is_given_a_rising_curve() -> None:
    timed = (1.06, 0.98, 0.95, 1.11, 0.99, 0.93)
    table = replace(TABLE, padded=False, knots=(1, 2, 3, 4, 5, 6), seconds=timed)
    model = CostModel(table, 2)
    rising = model.costs(2, 0, rising=True).tokens
    assert (np.diff(rising) >= 0).all()
    assert rising[1:].sum() == pytest.approx(sum(timed))
    assert (np.diff(model.costs(2, 100).tokens) < 0).any()
    assert (np.diff(model.costs(2, 100, rising=True).tokens) > 0).all()  # rows of a context each
    tiers = CostModel(replace(table, padded=True), 2)
    assert tiers.costs(2, 0, rising=True).tokens.tolist() == tiers.costs(2, 0).tokens.tolist()


def test_the_slope_behind_the_last_rows_is_that_of_a_rising_curve() -> None:
    seconds = np.array([1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.4])
    curve = tokens_curve(tuple(range(1, 9)), seconds, False, 10)
    # From 1.4 at five rows to 1.5 at eight, which are pooled with those before.
    assert curve[8:].tolist() == pytest.approx([1.4, 1.4 + 0.1 / 3, 1.4 + 0.2 / 3])


def by_hand(padded: bool, **settings: Any) -> tuple[CostModel, float]:
    """A model whose steps cost only their tokens and drafts, and its first correction: a twentieth
    of an error of 0.1."""
    table = replace(TABLE, padded=padded, per_request=0.0, per_context=0.0)
    model = CostModel(table, 4, UpdateConfig(rate=0.05, **{"refresh": 1, **settings}))
    return model, 0.05 * 0.1


def test_a_step_between_two_knots_corrects_each_by_its_weight() -> None:
    """7 tokens: 3/4 of knot 8, 1/4 of knot 4, and all of the common factor."""
    model, amount = by_hand(padded=False)
    seconds = [model.predict(Step(1, tokens, 0, 0)) for tokens in (1, 4, 8)]
    assert model.observe(Step(1, 7, 0, 0), model.predict(Step(1, 7, 0, 0)) * np.exp(0.1))
    norm = 1 + 0.75**2 + 0.25**2
    for tokens, before, own in zip((1, 4, 8), seconds, (0.0, 0.25, 0.75), strict=True):
        moved = np.log(model.predict(Step(1, tokens, 0, 0)) / before)
        assert moved == pytest.approx(amount * (1 + own) / norm, rel=1e-6), tokens


def test_a_step_before_the_second_knot_corrects_the_first_too() -> None:
    """3 tokens: 2/3 of knot 4, 1/3 of knot 1."""
    model, amount = by_hand(padded=False)
    seconds = [model.predict(Step(1, tokens, 0, 0)) for tokens in (1, 4)]
    assert model.observe(Step(1, 3, 0, 0), model.predict(Step(1, 3, 0, 0)) * np.exp(0.1))
    norm = 1 + (2 / 3) ** 2 + (1 / 3) ** 2
    for tokens, before, own in zip((1, 4), seconds, (1 / 3, 2 / 3), strict=True):
        moved = np.log(model.predict(Step(1, tokens, 0, 0)) / before)
        assert moved == pytest.approx(amount * (1 + own) / norm, rel=1e-6), tokens


@pytest.mark.parametrize("padded", [True, False])
def test_a_step_at_a_knot_corrects_that_knot_alone(padded: bool) -> None:
    model, amount = by_hand(padded)
    seconds = [model.predict(Step(1, tokens, 0, 0)) for tokens in (1, 4, 8)]
    assert model.observe(Step(1, 4, 0, 0), seconds[1] * np.exp(0.1))
    for tokens, before, own in zip((1, 4, 8), seconds, (0.0, 1.0, 0.0), strict=True):
        moved = np.log(model.predict(Step(1, tokens, 0, 0)) / before)
        assert moved == pytest.approx(amount * (1 + own) / 2, rel=1e-6), tokens


def test_a_drafting_step_corrects_the_cost_of_drafts() -> None:
    """At one request 0.2 s of 1.4 s is the draft, the rest is knot 4; the row of another number of
    requests, computed before, follows. Position 0 is no draft: it has the common factor alone."""
    model, amount = by_hand(padded=True)
    rows = {r: np.array(model.costs(r, 0).draft) for r in (1, 3)}
    assert model.observe(Step(1, 3, 0, 2), 1.4 * np.exp(0.1))
    curve, draft = 1.2 / 1.4, 0.2 / 1.4
    norm = 1 + curve**2 + draft**2
    for requests, before in rows.items():
        after = np.array(model.costs(requests, 0).draft)
        assert np.log(after[1:] / before[1:]) == pytest.approx(amount * (1 + draft) / norm)
        assert after[0] == pytest.approx(before[0] * np.exp(amount / norm))
    plain, _ = by_hand(padded=True)
    before = np.array(plain.costs(4, 0).draft)  # its row 0 is below 0
    assert plain.observe(Step(4, 4, 0, 0), plain.predict(Step(4, 4, 0, 0)) * np.exp(0.1))
    after = np.array(plain.costs(4, 0).draft)
    assert after[1] / before[1] == pytest.approx(after[0] / before[0])  # no draft, nothing learned


def test_the_curve_is_rebuilt_after_as_many_steps_as_configured() -> None:
    model, _ = by_hand(padded=True, refresh=3)
    step = Step(1, 4, 0, 0)
    before = model.predict(step)
    for _ in range(2):
        model.observe(step, before * 1.1)
        assert model.predict(step) == before
    model.observe(step, before * 1.1)
    assert model.predict(step) > before


@pytest.mark.parametrize(("often", "once"), [(5.0, 0.2), (0.2, 5.0)])
def test_an_outlier_on_the_other_side_starts_a_new_run(often: float, once: float) -> None:
    """With `persistent` 2 the third in a row on one side is believed."""
    model, _ = by_hand(padded=True, persistent=2)
    step = Step(1, 1, 0, 0)
    taken = [model.observe(step, each) for each in (often, often, once, often, often, often)]
    assert taken == [False] * 5 + [True]
    assert model.outliers == 5


def test_a_lasting_change_is_believed_a_glitch_is_not() -> None:
    model = CostModel(TABLE, max_requests=4, config=UpdateConfig(persistent=5))
    step = Step(1, 1, 0, 0)
    before = model.predict(step)
    assert [model.observe(step, 5 * before) for _ in range(5)] == [False] * 5
    assert model.predict(step) == before
    assert model.observe(step, before)  # back to normal: the run of outliers is over
    taken = [model.observe(step, 5 * before) for _ in range(200)]
    assert taken[:5] == [False] * 5
    assert all(taken[5:])
    assert model.predict(step) > 2 * before


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="cannot take"):
        CostModel(TABLE, 4).observe(Step(1, 1, 0, 0), 0.0)
    with pytest.raises(ValueError, match="ascending"):
        replace(TABLE, knots=(4, 1, 8, 16))
    with pytest.raises(ValueError, match="gamma"):
        replace(TABLE, draft_seconds=((0.0,), (0.0,)))
    with pytest.raises(ValueError, match="drafts of 2 for gamma 3"):
        replace(TABLE, key=replace(KEY, gamma=3))
    with pytest.raises(ValueError, match="not a number from 0"):
        replace(TABLE, per_request=-1.0)
    for impossible in (0.0, 1e-9, 3601.0, 1e308):  # of a pass
        with pytest.raises(ValueError, match="not a number from 1e-07 to 3600"):
            replace(TABLE, seconds=(*TABLE.seconds[:-1], impossible))
    replace(TABLE, seconds=(*TABLE.seconds[:-1], 3600.0))


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": (1e-8, 1.2, 2.0, 3.0)},
        {"seconds": (1.0, 1.2, 2.0, 1e308)},
        {"seconds": (1.0, 1.2, 2.0, float("nan"))},
        {"per_context": 1e9},
        {"draft_seconds": ((0.0, 0.1, 1e4), (0.0, 0.4, 0.5))},
        {"draft_seconds": ((-0.95, 0.1, 0.2), (0.0, 0.4, 0.5))},
    ],
)
def test_seconds_that_no_machine_takes_are_refused(change: dict[str, Any]) -> None:
    """A step of negative length would end the server at its first logarithm."""
    with pytest.raises(ValueError, match="is not a number from"):
        replace(TABLE, **change)
