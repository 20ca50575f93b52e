"""Sequential Temperature Scaling: recovers a known truth, and wrong labels are noticed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dspark.schedule.calibration import (
    GRID_HIGH,
    GRID_LOW,
    MINIMUM_LABELS,
    Calibration,
    Floats,
    Observations,
    _logistic,
    apply,
    apply_numpy,
    bin_of,
    conditional,
    ece,
    ece_debiased,
    ece_interval,
    fit,
    fit_shifts,
    logits_of,
    predicted,
    temperature_grid,
)
from sglang_dspark.schedule.survival import survival
from tests.schedule import worlds

STEPS = 6_000
# What so many steps tell of log T, by position: survival spans less and less along the block.
TOLERANCE = (0.15, 0.35, 0.35, 0.75)


def _errors(found: tuple[float, ...]) -> list[float]:
    """Error of log temperature by position."""
    return np.abs(np.log(found) - np.log(worlds.TRUE_TEMPERATURES)).tolist()


@pytest.mark.parametrize("censored", [False, True])
@pytest.mark.parametrize("binning", ["width", "mass"])
def test_known_temperatures_are_recovered(censored: bool, binning: str) -> None:
    data = worlds.sampled(worlds.build(STEPS, censored=censored))
    fitted = fit(data, binning=binning)
    for error, tolerance in zip(_errors(fitted.temperatures), TOLERANCE, strict=True):
        assert error < tolerance
    assert fitted.ece_before[0] > 0.08
    assert fitted.ece_after[0] < 0.02
    assert fitted.counts == tuple(int((data.verified >= k).sum()) for k in range(1, 5))


def test_calibration_holds_on_other_steps() -> None:
    fitted = fit(worlds.sampled(worlds.build(STEPS, seed=1)))
    fresh = worlds.sampled(worlds.build(STEPS, seed=2))
    for k in range(1, worlds.GAMMA + 1):
        label = fresh.survived(k).astype(float)
        before = apply_numpy(fresh.logits, Calibration.identity(worlds.GAMMA))[:, k - 1]
        after = apply_numpy(fresh.logits, Calibration(fitted.temperatures))[:, k - 1]
        assert ece(after, label) < 0.022
        assert ece(after, label) < ece(before, label)


@pytest.mark.parametrize(
    ("mutant", "censored"),
    [
        (worlds.greedy_labels, False),
        (worlds.unverified_as_failure, True),
        (worlds.rejection_ends_the_labels, False),
    ],
)
def test_wrong_labels_are_noticed(mutant: worlds.Labeller, censored: bool) -> None:
    """Fitted on wrong labels, the table is far off and worse for what really happens."""
    world = worlds.build(STEPS, censored=censored)
    truth = worlds.sampled(world)
    right, wrong = fit(truth), fit(mutant(world))
    assert max(_errors(right.temperatures)[:3]) < 0.35 < 0.9 < max(_errors(wrong.temperatures)[:3])
    rows = truth.known(3)
    label = truth.survived(3)[rows].astype(float)
    errors = [
        ece(apply_numpy(truth.logits, Calibration(table.temperatures))[rows, 2], label)
        for table in (right, wrong)
    ]
    assert errors[1] > 3 * errors[0]


def test_each_position_is_the_best_of_the_grid_given_those_before() -> None:
    """The definition itself, by brute force on little data, position by position."""
    data = worlds.sampled(worlds.build(400, seed=3, censored=True))
    fitted = fit(data)
    fixed: list[float] = []
    for k in range(1, worlds.GAMMA + 1):
        rows = data.known(k)
        if rows.sum() < MINIMUM_LABELS:
            assert fitted.temperatures[k - 1] == 1.0
        else:
            errors = [_error_with(data, [*fixed, float(t)]) for t in temperature_grid()]
            assert fitted.ece_after[k - 1] == pytest.approx(min(errors), abs=1e-12)
        fixed.append(fitted.temperatures[k - 1])
        assert fitted.ece_after[k - 1] == pytest.approx(_error_with(data, fixed), abs=1e-12)


def _error_with(data: Observations, temperatures: list[float]) -> float:
    k = len(temperatures)
    rows = data.known(k)
    scaled = data.logits[rows, :k] / np.array(temperatures)
    product = (1 / (1 + np.exp(-scaled))).prod(axis=1)
    return ece(product, data.survived(k)[rows].astype(float))


def test_calibrated_data_and_little_data_change_nothing() -> None:
    world = worlds.build(STEPS, seed=4)
    honest = np.log(world.chance) - np.log1p(-world.chance)
    few = worlds.sampled(worlds.build(MINIMUM_LABELS - 1))
    assert fit(few).temperatures == (1.0,) * worlds.GAMMA
    data = worlds.sampled(world)
    fitted = fit(Observations(honest, data.accepted, data.verified, data.request))
    assert np.abs(np.log(fitted.temperatures[:3])).max() < 0.35
    constant = np.zeros((200, 1))  # sigmoid(0 / T) is 1/2 for every T: no information, T stays 1
    nothing = Observations(constant, np.arange(200) % 2, np.ones(200, dtype=int), np.arange(200))
    assert fit(nothing).temperatures == (1.0,)


def _honest(world: worlds.World) -> Floats:
    """Logits [N, gamma] that are right."""
    return np.log(world.chance) - np.log1p(-world.chance)


@pytest.mark.parametrize("censored", [False, True])
def test_known_shifts_are_recovered(censored: bool) -> None:
    """A head that is too sure by another amount at each position: no temperature fixes it."""
    world = worlds.build(STEPS, seed=5, censored=censored)
    told = worlds.sampled(world)
    wrong = np.array([0.9, 0.7, 0.5, 0.5])
    data = Observations(2.0 * (_honest(world) + wrong), told.accepted, told.verified, told.request)
    found = fit_shifts(data)
    assert found.temperatures == pytest.approx((2.0,) * worlds.GAMMA, rel=0.1)
    assert np.array(found.shifts) == pytest.approx(-2.0 * wrong, abs=0.4)
    assert found.spread <= 0.05, "requests do not differ here"
    rows = data.known(2)
    label = data.survived(2)[rows].astype(float)
    tables = (Calibration(fit(data).temperatures), found)
    plain, moved = (predicted(data, table)[rows, 1] for table in tables)
    assert ece(moved, label) < 0.02
    assert ((moved - label) ** 2).mean() < ((plain - label) ** 2).mean()


def test_requests_that_differ_are_followed() -> None:
    """Each request strays by its own amount: the spread is found, and following them pays."""
    generator = np.random.default_rng(3)
    request = np.repeat(np.arange(120), 50)
    own = generator.normal(0, np.sqrt(0.4), size=120)[request]
    logits = generator.normal(0.5, 1.0, size=(6000, 3))
    chance = 1 / (1 + np.exp(-(logits + own[:, None])))
    accepted = np.cumprod(generator.uniform(size=chance.shape) < chance, axis=1).sum(axis=1)
    data = Observations(logits, accepted, np.full(6000, 3), request)
    found = fit_shifts(data)
    assert 0.2 <= found.spread <= 0.8
    still, followed = (conditional(data, each) for each in (replace(found, spread=0.0), found))
    truth = ((still - chance) ** 2).mean(), ((followed - chance) ** 2).mean()
    assert truth[1] < 0.35 * truth[0]
    first = np.flatnonzero(np.diff(request, prepend=-1))
    assert np.allclose(followed[first], still[first]), "nothing is known of a new request"
    order = np.argsort(np.arange(6000) % 50, kind="stable")  # requests mixed, each one in order
    assert np.allclose(conditional(data.of_steps(order), found), followed[order])


@pytest.mark.parametrize("spread", [0.1, 1.0])
def test_a_request_is_predicted_by_its_earlier_steps(spread: float) -> None:
    """Three steps of which all drafts failed: each leaves less hope for the next."""
    steps = np.zeros(3, np.int64)
    data = Observations(np.zeros((3, 2)), steps, steps + 2, steps)
    followed = predicted(data, Calibration((1.0, 1.0), spread=spread))[:, 0]
    assert followed[0] == pytest.approx(0.5)
    assert followed[0] > followed[1] > followed[2]
    assert predicted(data, Calibration((1.0, 1.0)))[:, 0].tolist() == [0.5, 0.5, 0.5]


def test_shifts_of_few_labels_stay_near_the_common_one() -> None:
    told = Observations(np.zeros((60, 2)), *[np.array([0, 1] * 30)] * 2, np.arange(60))
    found = fit_shifts(told)
    assert found.shifts[0] > found.shifts[1] > 0.5, "never reached, position 2 follows position 1"


def test_shift_needs_something_to_fit_to() -> None:
    nothing = Observations(np.zeros((3, 2)), *[np.zeros(3, dtype=int)] * 3)
    with pytest.raises(ValueError, match="no verified draft"):
        fit_shifts(nothing)


def test_debiased_error_removes_chance_and_keeps_the_rest() -> None:
    generator = np.random.default_rng(1)
    chance = generator.uniform(size=4000)
    label = (generator.uniform(size=4000) < chance).astype(float)
    request = np.arange(4000) // 40
    assert ece_debiased(chance, label, request) < 0.6 * ece(chance, label)
    off = np.clip(chance + 0.1, 0, 1)
    assert ece_debiased(off, label, request) == pytest.approx(ece(off, label), rel=0.05)
    assert np.isnan(ece_debiased(label[:0], label[:0], request[:0]))
    for bins in (9, 10, 11):
        same = ece_debiased(off, label, request) == ece_debiased(off, label, request, bins=bins)
        assert same == (bins == 10), "ten bins, as `ece` has"


def test_fit_is_deterministic_and_refuses_nothing_to_fit() -> None:
    data = worlds.sampled(worlds.build(500))
    assert fit(data) == fit(data)
    with pytest.raises(ValueError, match="no verify step"):
        fit(data.of_steps(np.zeros(500, dtype=bool)))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.floats(-90, 90, width=32), min_size=4, max_size=4), min_size=1, max_size=9
    ),
    temperatures=st.lists(st.floats(GRID_LOW, GRID_HIGH), min_size=4, max_size=4),
)
def test_survival_never_rises_along_the_block(
    rows: list[list[float]], temperatures: list[float]
) -> None:
    logits = torch.tensor(rows)
    a = apply(logits, torch.tensor(temperatures))
    assert a.dtype == torch.float32
    assert bool((a[:, 1:] <= a[:, :-1]).all())
    assert bool(((a >= 0) & (a <= 1)).all())
    assert torch.equal(a, apply(logits.clone(), torch.tensor(temperatures)))
    exact = torch.sigmoid(logits.double() / torch.tensor(temperatures).double()).cumprod(1)
    assert torch.allclose(a.double(), exact, rtol=1e-4, atol=1e-30)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0, 1, width=32), min_size=2, max_size=12))
def test_survival_is_the_product_left_to_right(factors: list[float]) -> None:
    a = survival(torch.tensor(factors))
    running = np.float32(1)
    for value, factor in zip(a.tolist(), factors, strict=True):
        running = np.float32(running * np.float32(factor))
        assert value == float(running)


@pytest.mark.parametrize("bad", [float("nan"), -0.1, 1.1])
def test_survival_refuses_what_is_no_confidence(bad: float) -> None:
    with pytest.raises(ValueError, match="confidence"):
        survival(torch.tensor([[0.5, bad]]))


@pytest.mark.parametrize("bad", [[0.0, 1.0], [-1.0, 1.0], [float("nan"), 1.0], [1.0]])
def test_apply_refuses_bad_temperatures(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="temperatures"):
        apply(torch.zeros(3, 2), torch.tensor(bad))


def test_no_shift_is_added_unless_asked_for() -> None:
    logits, temperatures = torch.tensor([[0.5, -1.0]]), torch.tensor([1.0, 2.0])
    expected = survival(torch.sigmoid(logits / temperatures))
    assert torch.equal(apply(logits, temperatures), expected)
    assert torch.equal(apply(logits, temperatures, 1.0), apply(logits + 1.0, temperatures))


def test_missing_confidence_head_stays_certain() -> None:
    """Logit +inf means `always verify`: survival 1 under every temperature."""
    logits = torch.full((2, 3), float("inf"))
    assert torch.equal(apply(logits, torch.tensor([0.1, 1.0, 10.0])), torch.ones(2, 3))


@settings(max_examples=60, deadline=None)
@given(st.floats(-80, 30, width=32))
def test_logits_come_back_from_float32_confidence(logit: float) -> None:
    confidence = torch.sigmoid(torch.tensor([logit])).double().numpy()
    back = float(logits_of(confidence)[0])
    # The sigmoid's float32 steps near 1 are what limits it: 2**-24, and it is off by one or two.
    slack = 1e-4 + 2.0**-23 * (1 + np.exp(min(logit, 17.0)))
    assert back == pytest.approx(min(logit, back) if logit > 15 else logit, abs=slack, rel=1e-5)
    assert np.isfinite(back)


def test_observations_refuse_contradictions() -> None:
    logits, one = np.zeros((2, 3)), np.ones(2, dtype=int)
    with pytest.raises(ValueError, match="accepted <= verified"):
        Observations(logits, one * 2, one, one)
    with pytest.raises(ValueError, match="accepted <= verified"):
        Observations(logits, one, one * 4, one)
    with pytest.raises(ValueError, match="NaN"):
        Observations(logits * float("nan"), one, one, one)
    with pytest.raises(ValueError, match="request"):
        Observations(logits, one, one, np.ones(3, dtype=int))


def test_bins_by_hand() -> None:
    values = np.array([0.05, 0.1, 0.1, 0.8, 0.85, 1.0])
    assert bin_of(values, bins=10, binning="width").tolist() == [0, 1, 1, 8, 8, 9]
    adaptive = bin_of(values, bins=2, binning="mass")
    assert adaptive.tolist() == [0, 0, 0, 1, 1, 1]
    tied = bin_of(np.full(6, 0.3), bins=3, binning="mass")
    assert len(set(tied.tolist())) == 1


def test_ece_by_hand() -> None:
    """Bin 0.8-0.9: |0.8 + 0.89 - 1|; bin 0.1-0.2: |0.1 - 1|, too low; the last bin is right."""
    values, labels = np.array([0.8, 0.89, 0.1, 1.0]), np.array([1.0, 0.0, 1.0, 1.0])
    assert ece(values, labels) == pytest.approx((0.69 + 0.9) / 4)
    assert np.isnan(ece(np.array([]), np.array([])))


def test_adaptive_bins_see_what_equal_width_averages_away() -> None:
    """All values in one bin of equal width, half too high and half too low by the same amount."""
    values = np.repeat([0.91, 0.97], 500)
    labels = np.concatenate([np.ones(500), np.arange(500) % 25 != 0])  # 1.00 and 0.96
    labels[:60] = 0  # 0.88 for the first half
    assert ece(values, labels, bins=2, binning="mass") > ece(values, labels, bins=2)


def test_debiased_error_has_ten_bins_of_the_width_or_mass_asked_for() -> None:
    """Twice 100 requests of one draft: those of 0.94 all fail, those of 0.96 all succeed."""
    values, request = np.repeat([0.94, 0.96], 100), np.arange(200)
    labels = np.repeat([0.0, 1.0], 100)
    assert ece_debiased(values, labels, request) == pytest.approx(0.45, abs=0.01)  # one bin
    by_mass = ece_debiased(values, labels, request, binning="mass")
    assert by_mass == pytest.approx((0.94 + 0.04) / 2, abs=0.01)
    # Of nine bins these two share one.
    values = np.repeat([0.895, 0.905], 100)
    apart = ece_debiased(values, labels, request)
    assert apart == pytest.approx((0.895 + 0.095) / 2, abs=0.01)
    assert apart == ece_debiased(values, labels, request, bins=10)
    assert ece_debiased(values, labels, request, bins=9) == pytest.approx(0.4, abs=0.01)


def test_bootstrap_draws_requests_not_steps() -> None:
    """Steps that repeat within a request carry no more information than one of them."""
    generator = np.random.default_rng(0)
    values = generator.uniform(size=400)
    labels = (generator.uniform(size=400) < values**2).astype(float)
    request = np.arange(400)
    low, high = ece_interval(values, labels, request)
    assert low < ece(values, labels) < high
    again = ece_interval(np.repeat(values, 9), np.repeat(labels, 9), np.repeat(request, 9))
    assert again == pytest.approx((low, high), abs=1e-9)
    as_steps = ece_interval(np.repeat(values, 9), np.repeat(labels, 9), np.arange(3600))
    assert as_steps[1] - as_steps[0] < 0.6 * (high - low)
    assert ece_interval(values, labels, request) == (low, high)
    assert np.isnan(ece_interval(values[:0], labels[:0], request[:0])[0])


@pytest.mark.parametrize("observations", [6, 400])
def test_the_regression_ends_where_its_slope_is_zero(observations: int) -> None:
    """Few observations leave the pull towards (1, 0, 0) its weight; many overrule it."""
    rng = np.random.default_rng(observations)
    design = rng.normal(size=(observations, 3))
    chance = 1 / (1 + np.exp(-design @ np.array([0.3, 1.5, -2.0])))
    label = (rng.random(observations) < chance).astype(np.float64)
    weights = np.array(_logistic(design, label))
    fitted = 1 / (1 + np.exp(-design @ weights))
    pull, centre = np.array([1.0, 1e-3, 1.0]), np.array([1.0, 0.0, 0.0])
    slope = design.T @ (label - fitted) - pull * (weights - centre)
    assert np.abs(slope).max() < 1e-6


def test_the_error_before_fitting_is_that_of_the_raw_survival() -> None:
    """The ECE of a_k = c_1 c_2 as the drafter said it, position by position."""
    rng = np.random.default_rng(5)
    logits = rng.normal(1.0, 1.0, (4000, 2))
    hits = rng.random((4000, 2)) < 1 / (1 + np.exp(-logits / 1.7))
    accepted = np.cumprod(hits, axis=1).sum(axis=1)
    data = Observations(logits, accepted, np.full(4000, 2), np.arange(4000))
    said = np.cumprod(1 / (1 + np.exp(-logits)), axis=1)
    found = fit(data)
    for k in range(2):
        label = (accepted > k).astype(np.float64)
        assert found.ece_before[k] == pytest.approx(ece(said[:, k], label))
        assert found.ece_after[k] < found.ece_before[k]
