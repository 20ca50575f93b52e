"""Penalties of verified rows are those of SGLang's own penalisers, fed token by token."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dspark.serving.cpu.penalties import Window, apply_penalties, penalised

VOCAB, EOS, WIDTH = 16, 2, 4
PROMPT = [1, 6]
AT_4TH = torch.tensor([4])  # position of the anchor when three tokens were put out
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
        rid="one",
        origin_input_ids=PROMPT,
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
    apply_penalties(found, reqs, window, AT_4TH.repeat(2), {})
    assert torch.allclose(found, expected, atol=1e-6)
    assert penalised(reqs) == ([] if name == "none" else [0])
    assert torch.equal(found[1], logits[1])  # the other request is left alone


def test_a_minimum_that_is_reached_inside_the_window_lets_stop_tokens_pass_behind_it() -> None:
    logits = torch.zeros(1, WIDTH, VOCAB)
    found = request([3, 4, 3], min_new_tokens=5)
    apply_penalties(logits, [found], torch.tensor([[3, 1, 1, 1]]), AT_4TH, {})
    assert torch.isinf(logits[0, :2, [EOS, 7]]).all()
    assert (logits[0, 2:] == 0).all()


def test_output_that_lags_behind_is_completed() -> None:
    """Two steps; the second one's outputs [3, 4, 3 | 8, 9 | 5] are listed up to a part of them."""
    first, second = torch.tensor([[3, 8, 9, 1]]), torch.tensor([[5, 2, 2, 2]])
    logits = torch.randn(1, WIDTH, VOCAB)
    found = []
    for known in ([3, 4], [3, 4, 3]):  # the anchor of the first step is or is not listed
        windows = apply_penalties(
            logits.clone(), [request(known, frequency_penalty=0.5)], first, AT_4TH, {}
        )
        assert windows == {"one": Window(3, [3, 8, 9, 1])}
        for listed in ([3, 4, 3], [3, 4, 3, 8, 9, 5]):
            row = logits.clone()
            late = request(listed, frequency_penalty=0.5)
            apply_penalties(row, [late], second, AT_4TH + 3, windows)
            found.append(row)
    assert all(torch.equal(each, found[0]) for each in found)
    gone = logits[0, 0] - found[0][0, 0]
    assert gone[[3, 4, 5, 8, 9]].tolist() == pytest.approx([1.0, 0.5, 0.5, 0.5, 0.5], abs=1e-6)


def test_output_that_cannot_be_known_is_told_and_no_reason_to_stop(
    caplog: pytest.LogCaptureFixture,
) -> None:
    lagging = request([3, 4], frequency_penalty=1.0)
    logits = torch.zeros(1, WIDTH, VOCAB)
    apply_penalties(logits, [lagging], torch.tensor([[9, 1, 1, 1]]), AT_4TH + 3, {})
    assert "3 of 6 output tokens" in caplog.text
    assert logits[0, 0].nonzero().flatten().tolist() == [3, 4, 9]
