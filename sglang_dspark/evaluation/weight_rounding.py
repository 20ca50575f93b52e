"""Measure what low-bit weights change: logits behind the same tokens, and the answers themselves.

The served formats round weights, and a product's activations too
(`backends/cpu/weight_formats.py`), so a target with the rounded numbers in float32 computes the
same as the server. Both targets compute the next token at every place of the exact target's greedy
answers; then the rounded one answers on its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_dspark.evaluation.engine import DecodeSettings, OnFinish, ReferenceEngine
from sglang_dspark.evaluation.records import Generation
from sglang_dspark.evaluation.target import TargetModel


@dataclass(frozen=True)
class Change:
    """Differences between a rounded and the exact target.

    tokens: places that were compared. logit_rms, logit_max: of the differences of logits, without
    a place's common shift. kl: nats, from the exact distribution to the rounded one at
    T = 1, mean over places. same_choice: share of places with the same most likely token.
    same_answers: share of prompts with identical answers. same_start: mean share of an answer
    before the first token that differs.
    """

    prompts: int
    tokens: int
    logit_rms: float
    logit_max: float
    kl: float
    same_choice: float
    same_answers: float
    same_start: float


def answer(
    target: TargetModel,
    prompts: Sequence[Sequence[int]],
    settings: DecodeSettings,
    on_finish: OnFinish | None = None,
) -> list[Generation]:
    """Decode the target's answers, without a drafter."""
    return ReferenceEngine(target, None, settings).run(prompts, on_finish)


def compare(
    exact: TargetModel,
    rounded: TargetModel,
    prompts: Sequence[Sequence[int]],
    ours: Sequence[Generation],
    theirs: Sequence[Generation],
) -> Change:
    """Compare two targets' logits and answers.

    ours, theirs: greedy answers of the exact and of the rounded target, in the prompts' order.
    Raises ValueError without prompts.
    """
    if not prompts:
        raise ValueError("no prompts to compare on")
    places = [
        _places(exact, rounded, prompt, answer.tokens)
        for prompt, answer in zip(prompts, ours, strict=True)
    ]
    found = torch.cat(places)  # [tokens, 4]
    starts = [_start(a.tokens, b.tokens) for a, b in zip(ours, theirs, strict=True)]
    return Change(
        prompts=len(prompts),
        tokens=len(found),
        logit_rms=float(found[:, 0].mean().sqrt()),
        logit_max=float(found[:, 1].max()),
        kl=float(found[:, 2].mean()),
        same_choice=float(found[:, 3].mean()),
        same_answers=sum(
            a.tokens == b.tokens for a, b in zip(ours, theirs, strict=True)
        ) / len(prompts),
        same_start=sum(starts) / len(starts),
    )  # fmt: skip


def _places(
    exact: TargetModel, rounded: TargetModel, prompt: Sequence[int], answer: Sequence[int]
) -> Tensor:
    """Compare both targets at an answer's n places; return [n, 4] float64.

    Columns: mean square and largest difference of logits, KL, whether both choose the same.
    """
    tokens = torch.tensor([[*prompt, *answer[:-1]]])  # [1, T]
    first, second = (_logits(each, tokens, len(answer)) for each in (exact, rounded))  # [n, V]
    difference = second - first
    difference = difference - difference.mean(-1, keepdim=True)
    log_p, log_q = first.log_softmax(-1), second.log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    same = (first.argmax(-1) == second.argmax(-1)).double()
    return torch.stack([difference.square().mean(-1), difference.abs().amax(-1), kl, same], -1)


def _logits(target: TargetModel, tokens: Tensor, last: int) -> Tensor:
    """Compute logits at the last places of tokens [1, T]: [last, V] float64."""
    cache = target.new_cache(1, tokens.shape[1])
    hidden = target.forward(tokens, torch.zeros(1, dtype=torch.long), cache).hidden[0, -last:]
    return target.logits(hidden).double()


def _start(ours: Sequence[int], theirs: Sequence[int]) -> float:
    """Return the share of our answer before the first token that differs."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    end = min(len(ours), len(theirs))
    same = next((at for at, (a, b) in pairs if a != b), end)
    return same / len(ours)


def round_weights(
    target: TargetModel,
    rounding: Callable[[Tensor], Tensor],
    activations: Callable[[Tensor], Tensor] | None = None,
) -> int:
    """Round every product's and embedding's weight [N, K]; return how many were rounded.

    rounding: float32 [N, K] -> the same shape and dtype. A tied weight is rounded once.
    activations: the same for a product's inputs, [..., K]; None: unchanged.
    """
    weights = target.product_weights()
    for weight in weights:
        weight.data = rounding(weight.data)
    if activations is not None:
        target.before_products(activations)
    return len(weights)
