"""Penalties of verified rows are those of SGLang's own penalisers, fed token by token."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dspark.serving.cpu.penalties import apply_penalties, penalised

VOCAB, EOS, WIDTH = 16, 2, 4
SETTINGS = {
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": 1.3},
    "repetition": {"repetition_penalty": 1.5},
    "negative": {"frequency_penalty": -0.4, "presence_penalty": -1.0},
    "minimum": {"min_new_tokens": 6},
    "all": {
        "frequency_penalty": 0.3,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
        "min_new_tokens": 5,
    },
    "none": {},
}


def request(outputs: list[int], **settings: Any) -> SimpleNamespace:
    """What penalties read of SGLang's `Req`."""
    usual = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
        "stop_token_ids": {7},
    }
    return SimpleNamespace(
        sampling_params=SimpleNamespace(**usual | settings),
        output_ids=outputs,
        eos_token_ids={EOS},
        tokenizer=SimpleNamespace(eos_token_id=EOS, additional_stop_token_ids=None),
    )


@dataclass(eq=False)
class Batch:
    """What the orchestrator reads of a batch; it keeps a weak reference."""

    reqs: list[SimpleNamespace]
    device: str = "cpu"


def plainly(logits: Tensor, reqs: list[SimpleNamespace], outputs: list[list[int]]) -> Tensor:
    """Logits [R, V] behind `outputs` of equal length, penalised by SGLang's orchestrator."""
    from sglang.srt.sampling.penaltylib import (
        BatchedFrequencyPenalizer,
        BatchedMinNewTokensPenalizer,
        BatchedPenalizerOrchestrator,
        BatchedPresencePenalizer,
        BatchedRepetitionPenalizer,
    )

    batch = Batch(reqs)
    orchestrator = BatchedPenalizerOrchestrator(
        vocab_size=VOCAB,
        batch=batch,
        penalizers={
            BatchedFrequencyPenalizer,
            BatchedMinNewTokensPenalizer,
            BatchedPresencePenalizer,
            BatchedRepetitionPenalizer,
        },
    )
    if not orchestrator.is_required:
        return logits
    for tokens in zip(*outputs, strict=True):
        orchestrator.cumulate_output_tokens(torch.tensor(tokens))
    additive = torch.zeros_like(logits)
    orchestrator.accumulate_additive_penalties(additive)
    found = logits + additive
    factor = orchestrator.accumulate_scaling_penalties()
    return found if factor is None else torch.where(found < 0, found * factor, found / factor)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_rows_are_penalised_as_plain_decoding_would(name: str) -> None:
    torch.manual_seed(0)
    outputs = [[3, 4, 3], [5, 5, 9]]
    reqs = [request(outputs[0], **SETTINGS[name]), request(outputs[1])]
    logits = torch.randn(2, WIDTH, VOCAB)
    window = torch.tensor([[3, 7, 3, 11], [9, 1, 5, 1]])
    expected = torch.stack(
        [
            plainly(
                logits[:, j].clone(),
                reqs,
                [out + window[r, 1 : j + 1].tolist() for r, out in enumerate(outputs)],
            )
            for j in range(WIDTH)
        ],
        dim=1,
    )
    found = logits.clone()
    apply_penalties(found, reqs, window)
    assert torch.allclose(found, expected, atol=1e-6)
    assert penalised(reqs) == ([] if name == "none" else [0])
    assert torch.equal(found[1], logits[1])  # the other request is left alone


def test_a_minimum_that_is_reached_inside_the_window_lets_stop_tokens_pass_behind_it() -> None:
    logits = torch.zeros(1, WIDTH, VOCAB)
    apply_penalties(logits, [request([3, 4, 3], min_new_tokens=5)], torch.tensor([[3, 1, 1, 1]]))
    assert torch.isinf(logits[0, :2, [EOS, 7]]).all()
    assert (logits[0, 2:] == 0).all()


def test_output_that_lags_is_noticed() -> None:
    lagging = request([3, 4], frequency_penalty=1.0)
    with pytest.raises(AssertionError, match="anchor"):
        apply_penalties(torch.zeros(1, WIDTH, VOCAB), [lagging], torch.tensor([[9, 1, 1, 1]]))
