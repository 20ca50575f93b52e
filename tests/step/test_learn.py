"""A result that has reached the host goes to the engine, with the step it is of."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from sglang_dspark.step.plan import learn, tag

REQS = [object(), object()]
STEP = SimpleNamespace(made_up=False)


def learned(*, tagged: bool = True, accepted: list[int] | None, windows: list[int]) -> mock.Mock:
    """The engine after a result of two requests."""
    result: Any = SimpleNamespace(
        num_correct_drafts_per_req_cpu=accepted, cap_lens=torch.tensor(windows)
    )
    if tagged:
        assert tag(result, STEP) is result  # type: ignore[arg-type]
    engine = mock.Mock()
    learn(SimpleNamespace(engine=engine), SimpleNamespace(reqs=REQS), result)  # type: ignore[arg-type]
    return engine


@pytest.mark.parametrize(("windows", "verified"), [([3, 1], [2, 0]), ([1, 1], [0, 0])])
def test_a_step_is_learned_with_its_verify_lengths(windows: list[int], verified: list[int]) -> None:
    engine = learned(accepted=[1, 0], windows=windows)
    step, lengths, accepted = engine.landed.call_args.args
    assert (step, lengths.tolist(), accepted.tolist()) == (STEP, verified, [1, 0])
    engine.processed.assert_called_once_with(REQS, [1, 0], any(verified))


@pytest.mark.parametrize(("tagged", "accepted"), [(False, [1, 0]), (True, None), (False, None)])
def test_another_result_teaches_nothing(tagged: bool, accepted: list[int] | None) -> None:
    engine = learned(tagged=tagged, accepted=accepted, windows=[3, 1])
    assert engine.mock_calls == []
