"""Requests with penalties, and what SGLang's own penalisers do to them, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

VOCAB, EOS, WIDTH = 16, 2, 4
PROMPT = [1, 6]
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
    """Build what penalties read of SGLang's `Req`."""
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
    """Hold what the orchestrator reads of a batch; it keeps a weak reference."""

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
