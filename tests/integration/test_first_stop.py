"""Two stops in one accepted window, served: the answer ends at the first, as plain decoding's."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.integration.serving import Served
from tests.integration.test_features import stream
from tests.integration.test_greedy_equal import accepted_drafts
from tests.integration.tiny_models import SPECIALS, TinyPair

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("tiny-pair")]

TOKENS = 12
BYTES = len(SPECIALS)  # the printable ones of ASCII come first: from "!" on


def chain(noisy: TinyPair, last: int) -> list[int]:
    """The greedy answer to a prompt that ends with this token."""
    answer = []
    for _ in range(TOKENS):
        last = int(noisy.logits[last].argmax())
        answer.append(last)
    return answer


def letter(token: int) -> str:
    """The token's text where that is one printable character, else nothing."""
    text = chr(token - BYTES + ord("!"))
    return text if token >= BYTES and text <= "~" else ""


def questions(noisy: TinyPair) -> list[tuple[int, list[int], int]]:
    """Prompts of a token, their answers, and where two tokens in a row stand that are letters and
    new in the answer."""
    found = []
    for last in range(BYTES, noisy.logits.shape[0]):
        answer = chain(noisy, last)
        for at in range(1, TOKENS - 1):
            first, second = answer[at : at + 2]
            new = first != second and not {first, second} & set(answer[:at])
            if new and letter(first) and letter(second):
                found.append((last, answer, at))
                break
    return found


@pytest.mark.parametrize("first", ["stop", "stop_token_ids", "stop_regex"])
def test_the_first_of_two_stops_ends_the_answer(
    tiny_dspark: Served, noisy: TinyPair, first: str
) -> None:
    asked = questions(noisy)[::6]
    assert len(asked) >= 20

    def ask(question: tuple[int, list[int], int]) -> dict[str, Any]:
        last, answer, at = question
        here, behind = letter(answer[at]), letter(answer[at + 1])
        matched = {
            "stop": here,
            "stop_token_ids": answer[at],
            "stop_regex": f"{re.escape(here)}$",
        }[first]
        sampling: dict[str, Any] = {"stop": [behind]}
        sampling[first] = [*sampling.get(first, ()), matched]
        got = tiny_dspark.generate([last], TOKENS, sampling_params=sampling)
        assert got["output_ids"] == answer[: at + 1]
        assert got["meta_info"]["finish_reason"] == {"type": "stop", "matched": matched}
        assert (here in got["text"]) == (first == "stop_regex")
        greedy = {"temperature": 0.0, **sampling}
        body = {"input_ids": [last], "sampling_params": greedy, "stream": True}
        assert stream(tiny_dspark, "/generate", body)[-1]["text"] == got["text"]
        return got

    got = tiny_dspark.each(ask, asked, 1)
    accepted, steps = accepted_drafts(got)
    assert accepted > steps / 2, "few drafts were accepted: few windows held two stops"
