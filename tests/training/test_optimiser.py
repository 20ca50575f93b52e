"""The optimiser's numbers by hand: the average of the weights, the clipped norm, the rate."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sglang_dspark.training.config import ScheduleConfig
from sglang_dspark.training.distributed import World
from sglang_dspark.training.optimiser import EMA_EVERY, Optimiser, learning_rate

SCHEDULE = ScheduleConfig.model_validate(
    {"steps": 20_000, "learning_rate": 8e-3, "warmup_steps": 4, "ema": 0.999, "clip": 1.0}
)


class Two(nn.Module):
    """Two parameters of unequal sizes, all 0."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(3))
        self.two = nn.Parameter(torch.zeros(2, 2))


def averages(found: Optimiser) -> list[float]:
    """The average of each parameter, whose elements are all equal."""
    assert found.average is not None
    assert all(bool((each == each.flatten()[0]).all()) for each in found.average)
    return [float(each.flatten()[0]) for each in found.average]


def jumped(schedule: ScheduleConfig = SCHEDULE) -> Optimiser:
    """Weights that were 0 when the average began, are 1 and 2 since, and have no gradient."""
    module = Two()
    found = Optimiser(module, schedule, World())
    with torch.no_grad():
        module.one.fill_(1.0)
        module.two.fill_(2.0)
    return found


def test_the_average_moves_after_each_eighth_step_by_eight_decays() -> None:
    """decay = min(ema, (1 + n) / (10 + n)) after n steps: 9 / 18 after 8, 17 / 26 after 16."""
    found = jumped()
    left = 1.0  # of the distance from the average to the weights
    assert EMA_EVERY == 8
    for number in range(16):
        found.step(number)
        if number == 7:
            left *= 0.5**8
        if number == 15:
            left *= (17 / 26) ** 8
        assert averages(found) == pytest.approx([1 - left, 2 * (1 - left)], rel=1e-5, abs=1e-7)
    with found.averaged():
        assert found.shards[1].tolist() == [pytest.approx([2 * (1 - left)] * 2, rel=1e-6)] * 2
    assert found.shards[1].tolist() == [[2.0, 2.0]] * 2


def test_a_long_run_averages_with_the_configured_decay() -> None:
    """After 16,000 steps 0.999 is below 16001 / 16010: eight steps of it leave 99.20%."""
    found = jumped()
    found.step(15_999)
    assert averages(found) == pytest.approx([1 - 0.999**8, 2 * (1 - 0.999**8)], rel=1e-4)
    assert averages(found)[0] == pytest.approx(0.0079720, rel=1e-3)


def test_the_norm_of_all_gradients_is_clipped() -> None:
    """Norms 3 and 4 are 5 together: a clip of 1 leaves a fifth, Adam's first moment a tenth."""
    module = Two()
    found = Optimiser(module, SCHEDULE, World())
    module.one.grad = torch.tensor([0.0, 0.0, 3.0])
    module.two.grad = torch.tensor([[0.0, 0.0], [-4.0, 0.0]])
    found.step(0)
    state = dict(found.state())
    assert float(state["exp_avg.0"][2]) == pytest.approx(0.1 * 3 / 5, rel=1e-5)
    assert float(state["exp_avg.1"][1, 0]) == pytest.approx(0.1 * -4 / 5, rel=1e-5)
    # Adam's first step is the rate itself, a quarter of 8e-3 in a warm-up of four steps.
    assert found.shards[0].tolist() == pytest.approx([0.0, 0.0, -2e-3], rel=1e-4)
    assert found.shards[1].flatten().tolist() == pytest.approx([0.0, 0.0, 2e-3, 0.0], rel=1e-4)


def test_the_rate_at_its_ends() -> None:
    rates = [learning_rate(step, SCHEDULE) for step in (0, 3, 4, 20_000, 30_000)]
    assert rates == pytest.approx([2e-3, 8e-3, 8e-3, 0.02 * 8e-3, 0.02 * 8e-3])
    none = SCHEDULE.model_copy(update={"warmup_steps": 0})
    assert learning_rate(0, none) == pytest.approx(8e-3)
