"""Streams cut anywhere, and what is counted in each of the three interfaces."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dspark.loadtest.client.bodies import Api, Sampling, request_body
from sglang_dspark.loadtest.client.stream import Answer, SseDecoder, refusal

EVENTS = ['{"a": "é"}', "two\nlines", "[DONE]"]
BYTES = (
    b": a comment\r\n\r\n"
    + 'data: {"a": "é"}\r\n\r\n'.encode()
    + b"event: x\nid: 3\ndata:two\ndata: lines\n\n"
    + b"data: [DONE]\n\n"
)


@given(cuts=st.sets(st.integers(1, len(BYTES) - 1)))
@settings(max_examples=60, deadline=None)
def test_events_come_out_whole_wherever_the_bytes_are_cut(cuts: set[int]) -> None:
    decoder = SseDecoder()
    edges = [0, *sorted(cuts), len(BYTES)]
    pieces = [BYTES[a:b] for a, b in itertools.pairwise(edges)]
    assert [event for piece in pieces for event in decoder.feed(piece)] == EVENTS


def test_an_unfinished_event_is_kept_back() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: half\n") == []
    assert decoder.feed(b"\n") == ["half"]


def usage(total: int) -> dict[str, Any]:
    return {"prompt_tokens": 5, "completion_tokens": total}


COMPLETIONS = [
    {"choices": [{"text": "a", "token_ids": [1], "finish_reason": None}], "usage": usage(1)},
    {"choices": [{"text": "bcd", "token_ids": [2, 3, 4]}], "usage": usage(4)},
    {"choices": [{"text": "", "token_ids": [5], "finish_reason": "stop"}], "usage": usage(5)},
]
CHAT = [
    {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
    {"choices": [{"delta": {"content": "a"}}], "usage": usage(1)},
    {"choices": [{"delta": {"content": "bcd"}}], "usage": usage(4)},
    {"choices": [{"delta": {"content": ""}, "finish_reason": "stop"}], "usage": usage(5)},
]
TAIL = [
    {
        "choices": [],
        "sglext": {
            "spec_tokens_details": {
                "spec_verify_ct": 2,
                "spec_num_correct_drafts": 2,
                "spec_correct_drafts_histogram": [1, 0, 1],
            }
        },
    },
    {"choices": [], "usage": usage(5)},
]
NATIVE = [
    {"text": "a", "output_ids": [1], "meta_info": {"prompt_tokens": 5}},
    {"text": "abcd", "output_ids": [1, 2, 3, 4], "meta_info": {"prompt_tokens": 5}},
    {
        "text": "abcd",
        "output_ids": [1, 2, 3, 4, 5],
        "meta_info": {
            "prompt_tokens": 5,
            "finish_reason": {"type": "stop"},
            "spec_verify_ct": 2,
            "spec_num_correct_drafts": 2,
            "spec_correct_drafts_histogram": [1, 0, 1],
        },
    },
]


@pytest.mark.parametrize(
    ("api", "events"),
    [("completions", COMPLETIONS + TAIL), ("chat", CHAT + TAIL), ("generate", NATIVE)],
)
def test_tokens_of_each_chunk(api: Api, events: list[dict[str, Any]]) -> None:
    answer = Answer()
    for at, event in enumerate(events):
        answer.add(api, event, float(at))
    assert [chunk.tokens for chunk in answer.chunks] == [1, 3, 1]
    assert [chunk.text for chunk in answer.chunks] == ["a", "bcd", ""]
    assert (answer.tokens, answer.prompt_tokens, answer.finish_reason) == (5, 5, "stop")
    assert answer.spec is not None
    assert answer.spec.tau == 2.0
    first = 1.0 if api == "chat" else 0.0  # the role alone is no token
    assert [chunk.at for chunk in answer.chunks] == [first, first + 1, first + 2]


def test_several_answers_of_one_request_are_counted_by_themselves() -> None:
    """SGLang's running usage is that of the answer whose chunk it comes with."""
    answer = Answer()
    for index, total, ids in ((0, 1, [1]), (1, 2, [1, 2]), (0, 3, [2, 3]), (1, 3, [3])):
        choice = {"index": index, "text": "x", "token_ids": ids}
        answer.openai({"choices": [choice], "usage": usage(total)}, 0.0)
    assert [chunk.tokens for chunk in answer.chunks] == [1, 2, 2, 1]
    assert answer.tokens == 6
    details = TAIL[0]["sglext"]["spec_tokens_details"]
    answer.openai({"choices": [], "sglext": {"spec_tokens_details": [details, details]}}, 0.0)
    assert answer.spec is not None
    assert (answer.spec.steps, answer.spec.accepted) == (4, 4)


def test_bodies_ask_for_what_is_counted() -> None:
    sampling = Sampling(max_new_tokens=7, extra={"top_p": 0.5})
    for api, prompt in (("completions", "hi"), ("chat", [{"role": "user", "content": "hi"}])):
        body = request_body(api, prompt, sampling)  # type: ignore[arg-type]
        assert body["stream"] is True
        assert body["stream_options"]["continuous_usage_stats"] is True
        assert (body["max_tokens"], body["top_p"]) == (7, 0.5)
    assert request_body("generate", [1, 2], sampling)["input_ids"] == [1, 2]
    assert request_body("generate", "hi", sampling)["text"] == "hi"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"error": {"message": "too\\nlong"}}', "too long"),
        ('{"message": "busy"}', "busy"),
        ('{"error": "plain"}', "plain"),
        ("<html>\n 502", "<html> 502"),
        ("[1]", "[1]"),
        ("x" * 999, "x" * 300),
    ],
)
def test_a_refusal_is_one_line(text: str, reason: str) -> None:
    assert refusal(text) == reason


def test_json_of_the_events_is_what_a_server_sends() -> None:
    decoder = SseDecoder()
    sent = b"".join(f"data: {json.dumps(event)}\n\n".encode() for event in COMPLETIONS)
    assert [json.loads(event) for event in decoder.feed(sent)] == COMPLETIONS
