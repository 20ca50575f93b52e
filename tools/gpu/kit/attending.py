"""Compare greedy answers of a target that attends, by plain decoding and by the scheduled server.

Every token of such a target (`models.ATTENDS`) depends on all KV rows before it. So equal answers
show that verify windows, KV slots and KV rows are right; answers from a table cannot show it.

Two correct servers differ by rounding, because their products and sums have other shapes. Where two
answers differ first, the plain server returns the margin of the two tokens' logits after the common
prefix. A difference with a margin within `near_tie` is rounding; any other fails.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.servers.server import ServerProcess
from sglang_dspark.models.simulated import SPECIALS
from tools.gpu.kit.sampled import post
from tools.gpu.kit.servers import COUNTERS_S, admitted

REQUESTS = 8  # fewest of a load: one user sends them one after the other
PROMPT_TOKENS, ANSWER_TOKENS = (8, 48), (16, 40)  # fewest and most; both vary within a batch
# Two servers round each of two logits differently, by two spacings of the dtype at most. Margins of
# the 0.6B target in bfloat16 deviate from float32's by 1.6 spacings, by 4.5 in the worst of 87.
_NEAR_TIE_SPACINGS = 8
_DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}  # of the servers' logits
_ZERO_LOGIT = SPECIALS.index("<s>")  # the LM head's rows of special tokens are zero


@dataclass(frozen=True)
class Answers:
    """Greedy answers of one server: token ids, and verify steps and drafts by its counters."""

    ids: list[list[int]]
    steps: int = 0
    accepted: int = 0
    verified: int = 0


@dataclass(frozen=True)
class Parting:
    """The first place where two answers to a request differ, and the two tokens there."""

    request: int
    position: int
    plain: int
    scheduled: int


@dataclass(frozen=True)
class Margin:
    """The distance of plain decoding's logits of two tokens, and the larger magnitude."""

    value: float
    logit: float


def agreement(
    plain: ServerProcess,
    scheduled: ServerProcess,
    model: Path,
    users: Sequence[int],
    device: str,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each load of `users` requests at once; a row that fails has `failed`.

    model: folder of the target that both serve. device: `cuda` or `cpu`, which sets the dtype of
    their logits. Both servers are frozen before and after. Rows: `requests`; requested `tokens`;
    `compared`, those up to the first difference of each answer; `equal` answers; `near_ties`;
    `largest_margin` of a difference, null without one; `tau`, `accepted`, `rejected` drafts. A load
    without accepted drafts, or without rejected ones, shows nothing and fails.
    """
    vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
    for load in users:
        row: dict[str, Any] = {"attending": load}
        try:
            row |= one_load(plain, scheduled, load, vocabulary, _DTYPES[device])
        except DSparkError as error:
            row["failed"] = str(error)
        yield row


def passes(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether all answers of all loads are right and at least one load is a proof.

    If drafts do not pay at a load, none is accepted: its answers can be right but prove nothing.
    """
    right = [row.get("equal", 0) + row.get("near_ties", 0) == row.get("requests") for row in rows]
    return all(right) and any("failed" not in row for row in rows)


def one_load(
    plain: ServerProcess, scheduled: ServerProcess, users: int, vocabulary: int, dtype: torch.dtype
) -> dict[str, Any]:
    """Measure one load's row, without its name. Raises DSparkError if a server does not answer."""
    prompts, lengths = requests_of(users, vocabulary)
    expected = answers_of(plain, prompts, lengths, users)
    found = answers_of(scheduled, prompts, lengths, users)
    parted = partings(expected.ids, found.ids, lengths)
    return judged(lengths, found, parted, margins_of(plain, prompts, expected.ids, parted), dtype)


def requests_of(users: int, vocabulary: int) -> tuple[list[list[int]], list[int]]:
    """Draw random prompts and the tokens that each requests; equal for equal arguments."""
    draws = np.random.default_rng(users)
    count = users * -(-REQUESTS // users)
    sizes = draws.integers(PROMPT_TOKENS[0], PROMPT_TOKENS[1] + 1, count)
    prompts = [draws.integers(len(SPECIALS), vocabulary, size).tolist() for size in sizes]
    return prompts, draws.integers(ANSWER_TOKENS[0], ANSWER_TOKENS[1] + 1, count).tolist()


def answers_of(
    server: ServerProcess, prompts: list[list[int]], lengths: list[int], users: int
) -> Answers:
    """Get greedy answers in batches of `users` from a server that is frozen before and after."""
    server.resume()
    try:
        before, answers = admitted(server), []
        for first in range(0, len(prompts), users):
            batch = slice(first, first + users)
            sampling = [_greedy(length) for length in lengths[batch]]
            body = {"input_ids": prompts[batch], "sampling_params": sampling}
            answers += post(f"{server.spec.url}/generate", body)
        time.sleep(COUNTERS_S)
        verified = int(admitted(server) - before)
    finally:
        server.pause()
    about = [answer["meta_info"] for answer in answers]
    return Answers(
        [answer["output_ids"] for answer in answers],
        _total(about, "spec_verify_ct"),
        _total(about, "spec_num_correct_drafts"),
        # without our scheduler every draft is verified
        verified or _total(about, "spec_num_proposed_drafts"),
    )


def partings(
    plain: Sequence[Sequence[int]], scheduled: Sequence[Sequence[int]], lengths: Sequence[int]
) -> list[Parting]:
    """Find the first difference of each two answers. Raises DSparkError if one is too short."""
    parted = []
    for request, (expected, found, length) in enumerate(
        zip(plain, scheduled, lengths, strict=True)
    ):
        for name, ids in (("plain", expected), ("scheduled", found)):
            if len(ids) != length:
                raise DSparkError(
                    f"request {request}: the {name} server answered {len(ids)} of {length} tokens"
                )
        for position, pair in enumerate(zip(expected, found, strict=True)):
            if pair[0] != pair[1]:
                parted.append(Parting(request, position, *pair))
                break
    return parted


def margins_of(
    plain: ServerProcess,
    prompts: list[list[int]],
    answers: list[list[int]],
    parted: Sequence[Parting],
) -> list[Margin]:
    """Measure the margin of each difference on the plain server, after the common prefix."""
    if not parted:
        return []
    body = {
        "input_ids": [
            prompts[each.request] + answers[each.request][: each.position] for each in parted
        ],
        "sampling_params": [_greedy(1)] * len(parted),
        "return_logprob": True,
        "token_ids_logprob": [[each.plain, each.scheduled, _ZERO_LOGIT] for each in parted],
    }
    plain.resume()
    try:
        found = post(f"{plain.spec.url}/generate", body)
    finally:
        plain.pause()
    said = [answer["meta_info"]["output_token_ids_logprobs"][0] for answer in found]
    return [margin(each, entries) for each, entries in zip(parted, said, strict=True)]


def margin(parted: Parting, entries: Sequence[Sequence[Any]]) -> Margin:
    """Compute a margin. entries: [log-probability, token, ...] of both tokens and of `_ZERO_LOGIT`.

    The last one's logit is zero."""
    logprobs = {int(token): float(value) for value, token, *_ in entries}
    first, second = (
        logprobs[token] - logprobs[_ZERO_LOGIT] for token in (parted.plain, parted.scheduled)
    )
    return Margin(abs(first - second), max(abs(first), abs(second)))


def near_tie(logit: float, dtype: torch.dtype) -> float:
    """Return the largest margin of logits of this size that rounding can decide."""
    spacing = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(logit), 1.0)))
    return _NEAR_TIE_SPACINGS * spacing


def judged(
    lengths: Sequence[int],
    found: Answers,
    parted: Sequence[Parting],
    margins: Sequence[Margin],
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Return a load's figures, and `failed` with the reason in one line if it is no proof."""
    wrong = [
        (each, margin)
        for each, margin in zip(parted, margins, strict=True)
        if not margin.value <= near_tie(margin.logit, dtype)  # NaN is wrong too
    ]
    rejected = found.verified - found.accepted
    unread = sum(lengths[each.request] - each.position for each in parted)
    row: dict[str, Any] = {
        "requests": len(lengths),
        "tokens": sum(lengths),
        "compared": sum(lengths) - unread,
        "equal": len(lengths) - len(parted),
        "near_ties": len(parted) - len(wrong),
        "largest_margin": max((each.value for each in margins), default=None),
        "tau": 1 + found.accepted / found.steps if found.steps else None,
        "accepted": found.accepted,
        "rejected": rejected,
    }
    if wrong:
        each, first = wrong[0]
        row["failed"] = (
            f"{len(wrong)} of {len(lengths)} answers are not plain decoding's: request "
            f"{each.request} has token {each.scheduled} in place of {each.plain} at position "
            f"{each.position}, with a margin of {first.value:.3g} "
            f"(near tie: {near_tie(first.logit, dtype):.1g})"
        )
    elif not found.accepted:
        row["failed"] = "no draft was accepted, so nothing is shown"
    elif rejected <= 0:
        row["failed"] = "no draft was rejected, so nothing is shown"
    return row


def _greedy(tokens: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}


def _total(about: Sequence[dict[str, Any]], key: str) -> int:
    return sum(int(each.get(key, 0)) for each in about)
