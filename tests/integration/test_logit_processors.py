"""Custom logit processors, served: one that counts the tokens of the answer acts as in plain
decoding, beside requests that have drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import dill
import pytest
from sglang.srt.sampling.custom_logit_processor import (
    CustomLogitProcessor,
    DisallowedTokensLogitsProcessor,
)

from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool
from tests.integration.test_greedy_equal import accepted_drafts
from tests.integration.tiny_models import TinyPair

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("tiny-pair")]

TOKENS, EVERY, FORCED = 24, 5, 40
USERS = 6
LASTS = range(10, 250, 20)  # prompts of one token


class Forcing(CustomLogitProcessor):
    """The forced token is the answer's fifth, tenth, ... as far as the answer is seen: `behind` of
    its last tokens are not."""

    def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
        for row, given in enumerate(custom_param_list):
            seen = max(len(given["__req__"].output_ids) - given["behind"], 0)
            if (seen + 1) % given["every"] == 0:
                logits[row] = -1e9
                logits[row, given["forced"]] = 0.0
        return logits


Forcing.__module__ = "__main__"  # so that it is sent whole, as a client's own is


def counted(behind: int = 0) -> dict[str, Any]:
    """Fields of a request whose answer is so forced."""
    custom = {"every": EVERY, "forced": FORCED, "behind": behind}
    return {
        "custom_logit_processor": json.dumps({"callable": dill.dumps(Forcing, recurse=True).hex()}),
        "sampling_params": {"custom_params": custom, "ignore_eos": True},
    }


@pytest.fixture(scope="module")
def processing(pool: ServerPool, noisy: TinyPair) -> Iterator[Served]:
    """Start a server that drafts in every step, at any cost."""
    config = pool.folder / "processing.yaml"
    config.write_text("schedule: {threshold: 0.1}\n")
    flags = ("--enable-custom-logit-processor", "--dspark-config", str(config))
    yield pool.start("processing", noisy.target, *DSPARK_FLAGS, str(noisy.drafter), *flags)
    pool.stop("processing")


def greedy(pair: TinyPair, last: int, *, forced: bool = False, without: int | None = None) -> Any:
    """Plain decoding's answer to a prompt of one token."""
    logits = pair.logits.clone()
    if without is not None:
        logits[:, without] = -float("inf")
    answer: list[int] = []
    while len(answer) < TOKENS:
        last = int(logits[last].argmax())
        last = FORCED if forced and (len(answer) + 1) % EVERY == 0 else last
        answer.append(last)
    return answer


def test_a_processor_that_counts_tokens_acts_as_in_plain_decoding(
    processing: Served, noisy: TinyPair
) -> None:
    def ask(item: tuple[int, bool]) -> dict[str, Any]:
        last, counts = item
        fields = counted() if counts else {"sampling_params": {"ignore_eos": True}}
        return processing.generate([last], TOKENS, **fields)

    items = [(last, counts) for last in LASTS for counts in (True, False)]
    answers = processing.each(ask, items, USERS)
    for (last, counts), answer in zip(items, answers, strict=True):
        assert answer["output_ids"] == greedy(noisy, last, forced=counts)
    assert accepted_drafts(answers[::2]) == (0, len(LASTS) * (TOKENS - 1))
    assert accepted_drafts(answers[1::2])[0] > 0, "no draft was accepted: nothing was tested"


def test_a_processor_of_rows_alone_keeps_its_drafts(processing: Served, noisy: TinyPair) -> None:
    never = greedy(noisy, LASTS[0])[2]
    fields = {
        "custom_logit_processor": DisallowedTokensLogitsProcessor.to_str(),
        "sampling_params": {"custom_params": {"token_ids": [never]}, "ignore_eos": True},
    }
    answers = processing.generate_all(
        [[last] for last in LASTS], USERS, max_new_tokens=TOKENS, **fields
    )
    for last, answer in zip(LASTS, answers, strict=True):
        assert answer["output_ids"] == greedy(noisy, last, without=never)
    assert accepted_drafts(answers)[0] > 0


def test_one_that_cannot_be_loaded_is_refused(processing: Served) -> None:
    body = {"input_ids": [20], "custom_logit_processor": "x"}
    answer = processing.request("POST", "/generate", json=body)
    assert answer.status_code == 400
    assert "custom_logit_processor: it cannot be loaded" in answer.text
    assert processing.healthy()


def test_it_acts_so_where_every_draft_is_verified(tiny_dspark: Served, noisy: TinyPair) -> None:
    counts = tiny_dspark.generate([20], TOKENS, **counted())
    beside = tiny_dspark.generate([20], TOKENS, sampling_params={"ignore_eos": True})
    assert counts["output_ids"] == greedy(noisy, 20, forced=True)
    assert beside["output_ids"] == greedy(noisy, 20)
    assert (accepted_drafts([counts])[0], accepted_drafts([beside])[0] > 0) == (0, True)
