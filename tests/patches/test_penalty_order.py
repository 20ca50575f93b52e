"""SGLang's penalties: one order for any order of their set, and the same as DSPARK's."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.sampling import penaltylib

from sglang_dspark.patches.upstream_fixes import penalty_order
from sglang_dspark.step.penalties import settings_of
from sglang_dspark.verify.penalties import penalise_windows
from tests.patches.hooked import put_in

SETTINGS = {
    "frequency_penalty": 0.3,
    "presence_penalty": 1.0,
    "repetition_penalty": 0.8,
    "min_new_tokens": 9,
    "stop_token_ids": {2},
}
CLASSES = [
    penaltylib.BatchedFrequencyPenalizer,
    penaltylib.BatchedMinNewTokensPenalizer,
    penaltylib.BatchedPresencePenalizer,
    penaltylib.BatchedRepetitionPenalizer,
]
LOGITS = torch.tensor([0.5, -0.7, 3.0, 1.2, -2.0, 0.9])
OUTPUTS = [0, 1, 1, 3]


@dataclass
class Batch:
    """Hold the fields that the orchestrator reads; it keeps a weak reference."""

    reqs: list[Any]
    device: str = "cpu"


def request() -> Any:
    tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=5)
    sampling = SimpleNamespace(**SETTINGS)
    return SimpleNamespace(
        tokenizer=tokenizer, sampling_params=sampling, eos_token_ids={5}, output_ids=OUTPUTS
    )


def applied(order: Any) -> torch.Tensor:
    """Logits [V] under penalties, by SGLang's orchestrator with its classes in `order`."""
    batch = Batch([request()])
    asked = penaltylib.BatchedPenalizerOrchestrator(
        vocab_size=len(LOGITS), batch=batch, penalizers=order
    )
    for token in OUTPUTS:
        asked.cumulate_output_tokens(torch.tensor([token]))
    logits = LOGITS.clone()[None]
    asked.apply(logits)
    return logits[0]


def test_penalties_are_applied_in_one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, penalty_order.SEAMS)
    wanted = LOGITS.clone()
    penalise_windows(
        wanted.view(1, 1, -1),
        rows=torch.tensor([0]),
        window=torch.tensor([OUTPUTS[-1:]]),
        counts=torch.tensor(OUTPUTS).bincount(minlength=len(LOGITS))[None],
        outputs=torch.tensor([len(OUTPUTS)]),
        penalties=settings_of([request()], wanted),
    )
    for order in permutations(CLASSES):
        torch.testing.assert_close(applied(order), wanted)
    assert torch.equal(applied(set(CLASSES)), applied(CLASSES))
