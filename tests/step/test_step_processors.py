"""Custom logit processors: who gets no drafts, who is refused, and how the engine keeps to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.sampling.custom_logit_processor import (
    CustomLogitProcessor,
    DisallowedTokensLogitsProcessor,
    Qwen3ThinkingBudgetLogitProcessor,
)

from sglang_dspark.patches.step.unsupported import check_processor
from sglang_dspark.step.rules import limits_of
from tests.step.engine_scenario import GAMMA, Scenario


class Forbidding(DisallowedTokensLogitsProcessor):
    """A client's own processor may read anything."""


ROWS_ALONE = DisallowedTokensLogitsProcessor.to_str()
READS: list[type[CustomLogitProcessor]] = [Qwen3ThinkingBudgetLogitProcessor, Forbidding]


class Asked(SimpleNamespace):
    """The fields of SGLang's `Req` that are read."""

    def set_finish_with_abort(self, message: str) -> None:
        self.to_finish = message


def request(processor: str | None) -> Any:
    return Asked(custom_logit_processor=processor, to_finish=None)


@pytest.mark.parametrize("processor", READS)
def test_only_rows_by_themselves_keep_their_drafts(processor: type[CustomLogitProcessor]) -> None:
    reqs = [request(None), request(processor.to_str()), request(ROWS_ALONE)]
    limits = limits_of(reqs, GAMMA)
    assert limits is not None
    assert limits.tolist() == [GAMMA, 0, GAMMA]
    assert limits_of(reqs[:1], GAMMA) is None


@pytest.mark.parametrize("floor", [0, 1])
def test_a_request_without_drafts_shares_a_step_with_others(floor: int) -> None:
    world = Scenario(floor=floor)
    for _ in range(6):
        plan, lengths = world.step([1, 2], logit=4.0, limits=[0, GAMMA])
        assert lengths[0] == 0
        assert plan.limits[0] == 0
    assert lengths == [0, GAMMA]


def test_when_no_request_may_draft_none_is_made_and_the_guard_is_unchanged() -> None:
    world, other = Scenario(), Scenario()
    for _ in range(40):
        plan, lengths = world.step([1], limits=[0], good=0)
        assert not plan.speculates
        assert lengths == [0]
    assert world.planner.fallbacks == 0
    for _ in range(4):
        plan, lengths = world.step([1], logit=4.0)
        wanted, _ = other.step([1], logit=4.0)
        assert (plan.mode, plan.budget.depth) == (wanted.mode, wanted.budget.depth)
    assert lengths == [GAMMA]


def scheduler(*, dspark: bool = True, scheduled: bool = False) -> Any:
    worker = SimpleNamespace(dspark_step=SimpleNamespace() if scheduled else None)
    algorithm = SimpleNamespace(is_dspark=lambda: dspark)
    return SimpleNamespace(spec_algorithm=algorithm, model_worker=worker)


@pytest.mark.parametrize(
    ("world", "processor", "says"),
    [
        (scheduler(), READS[0].to_str(), "verifies every draft"),
        (scheduler(), ROWS_ALONE, None),
        (scheduler(), None, None),
        (scheduler(scheduled=True), READS[0].to_str(), None),
        (scheduler(dspark=False), READS[0].to_str(), None),
        (scheduler(dspark=False), "x", "cannot be loaded"),
        (scheduler(scheduled=True), '{"callable": "8004"}', "cannot be loaded"),
    ],
)
def test_what_cannot_be_kept_is_refused(
    world: Any, processor: str | None, says: str | None
) -> None:
    req = request(processor)
    check_processor(None, world, req)
    if says is None:
        assert req.to_finish is None
        assert req.custom_logit_processor == processor
    else:
        assert req.to_finish.startswith("custom_logit_processor: ")
        assert says in req.to_finish
        assert req.custom_logit_processor is None


def test_a_request_that_is_refused_already_keeps_its_reason() -> None:
    req = request("x")
    req.to_finish = "too long"
    check_processor(None, scheduler(), req)
    assert req.to_finish == "too long"
