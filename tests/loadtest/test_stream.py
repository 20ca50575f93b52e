"""Streams cut anywhere, and what is counted in each of the three interfaces."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_dspark.loadtest.client.bodies import Api, Sampling, request_body
from sglang_dspark.loadtest.client.stream import (
    Answer,
    AnswerReader,
    MalformedEventError,
    ReportedError,
    SseDecoder,
    SseEvent,
    loops,
    refusal,
    spread,
)

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
    found = [event for piece in pieces for event in decoder.feed(piece)]
    assert [event.data for event in found] == EVENTS
    assert [event.name for event in found] == ["", "x", ""]


def test_an_unfinished_event_is_kept_back() -> None:
    decoder = SseDecoder()
    assert decoder.feed(b"data: half\n") == []
    assert decoder.feed(b"\n") == [SseEvent("", "half")]
    assert decoder.feed(b"data: [DONE]\n") == [SseEvent("", "[DONE]")]  # with no line behind it


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
    assert answer.close() == ("ok", "")
    assert [chunk.tokens for chunk in answer.chunks] == [1, 3, 1]  # no usage at the end is spread
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
        ('{"error": null, "message": "busy"}', "busy"),
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
    assert [json.loads(event.data) for event in decoder.feed(sent)] == COMPLETIONS


def read(*lines: str, api: Api = "chat") -> tuple[Answer, bool]:
    """An answer of these lines, and whether its end mark came."""
    answer = Answer()
    reader = AnswerReader(api, answer)
    ends = [reader.feed(f"{line}\n\n".encode(), float(at)) for at, line in enumerate(lines)]
    return answer, any(ends)


def chunk(text: str, finish: str | None = None, **other: Any) -> str:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice], **other})}"


@pytest.mark.parametrize(
    "error",
    [
        'event: error\ndata: {"message": "boom", "code": 500}',
        "event: error\ndata: boom",
        'data: {"error": {"message": "boom"}}',
        'data: {"error": "boom"}',
        'data: {"object": "error", "message": "boom", "code": 500}',
    ],
)
def test_an_error_in_the_stream_is_no_end(error: str) -> None:
    with pytest.raises(ReportedError, match=r"^boom$"):
        read(chunk("half"), error, "data: [DONE]")


def test_no_error_is_no_error() -> None:
    answer, ended = read(chunk("a", error=None), chunk("", "stop", usage=usage(1), error=None))
    assert (answer.close(), ended) == (("ok", ""), False)


@pytest.mark.parametrize("data", ["{half", "[1]", "7", '{"choices": [3]}', '{"choices": {"a": 1}}'])
def test_an_event_that_cannot_be_read_is_shown(data: str) -> None:
    with pytest.raises(MalformedEventError, match="cannot read the event") as error:
        read(f"data: {data}")
    assert repr(data) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_stream_without_a_finish_reason_is_cut() -> None:
    answer, ended = read(chunk("a", usage=usage(1)), "data: [DONE]")
    assert (answer.close(), ended) == (("cut", "the stream ended without a finish_reason"), True)
    several = [
        {"index": 0, "text": "a", "token_ids": [1], "finish_reason": "stop"},
        {"index": 1, "text": "b", "token_ids": [2]},
    ]
    lines = [f"data: {json.dumps({'choices': [choice]})}" for choice in several]
    assert read(*lines, api="completions")[0].close()[0] == "cut"  # the second goes on
    ended_too = json.dumps({"choices": [{"index": 1, "text": "", "finish_reason": "stop"}]})
    assert read(*lines, f"data: {ended_too}", api="completions")[0].close()[0] == "ok"
    native = {"text": "a", "output_ids": [1], "meta_info": {"finish_reason": None}}
    assert read(f"data: {json.dumps(native)}", api="generate")[0].close()[0] == "cut"


def test_an_abort_of_the_server_is_an_error() -> None:
    answer, _ = read(chunk("a", usage=usage(1)), chunk("", "abort", usage=usage(1)))
    assert answer.close()[0] == "error"


@pytest.mark.parametrize("alone", [True, False])
def test_a_usage_at_the_end_is_spread_over_the_text(alone: bool) -> None:
    """OpenAI sends it in an event without choices, others with the last chunk."""
    words = [chunk("a"), chunk("bcd"), chunk("ef")]
    end = [chunk("", "stop"), f"data: {json.dumps({'choices': [], 'usage': usage(9)})}"]
    answer, _ = read(*words, *(end if alone else [chunk("", "stop", usage=usage(9))]))
    assert answer.close() == ("ok", "")
    found = [(each.at, each.text, each.tokens) for each in answer.chunks]
    assert found == [(0.0, "a", 2), (1.0, "bcd", 4), (2.0, "ef", 3)]
    assert (answer.tokens, answer.prompt_tokens) == (9, 5)


def test_thoughts_are_tokens_too() -> None:
    delta = {"reasoning_content": "hm", "content": None}
    thought = json.dumps({"choices": [{"index": 0, "delta": delta}]})
    answer, _ = read(f"data: {thought}", chunk("a"), chunk("", "stop", usage=usage(4)))
    assert answer.close() == ("ok", "")
    assert [c.at for c in answer.chunks] == [0.0, 1.0]


def test_no_count_at_all_is_one_reason() -> None:
    answer, _ = read(chunk("a"), chunk("b", "stop"), "data: [DONE]")
    outcome, reason = answer.close()
    assert outcome == "malformed"
    assert reason.startswith("the server counts no tokens in its stream: it sends neither `usage`")


@pytest.mark.parametrize(
    ("tokens", "lengths", "counts"),
    [
        (3, [5, 1, 9], [1, 1, 1]),
        (9, [1, 3, 2], [2, 4, 3]),
        (1, [4, 4], [0, 1]),
        (7, [2], [7]),
        (5, [1, 1, 1, 1], [1, 1, 2, 1]),
    ],
)
def test_spread_adds_up(tokens: int, lengths: list[int], counts: list[int]) -> None:
    found = spread(tokens, lengths)
    assert sum(found) == tokens
    assert found == counts


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("w " * 32, True),
        ("So it goes, and then " + "no, no, " * 9, True),
        ("The end. " * 10, True),
        ("Rivers carry a little salt from the rocks to the sea, year by year.", False),
        ("Rivers carry salt to the sea " + "!" * 9, False),  # less than half of it
        ("ha ha ha ha", False),  # too short to tell
        ("ab" * 8, True),  # a half of eight characters is just enough
        ("ab" * 7, False),
        ("", False),
    ],
)
def test_a_text_loops_when_its_last_half_is_one_piece(text: str, expected: bool) -> None:
    assert loops(text) is expected
