"""Ollama's, Anthropic's and OpenAI's interfaces of one server: whole answers and right endings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.serving import Served

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("demo-pair")]

HI = [{"role": "user", "content": "Hi"}]


def ollama(server: Served, *, stream: bool, **options: Any) -> tuple[str, dict[str, Any]]:
    """The text of an answer to /api/chat, and its last line."""
    body = {"model": "demo", "messages": HI, "stream": stream, "options": options}
    answer = server.request("POST", "/api/chat", json=body)
    assert answer.status_code == 200, answer.text[:300]
    lines = [json.loads(line) for line in answer.text.splitlines()]
    return "".join(line["message"]["content"] for line in lines), lines[-1]


@pytest.mark.parametrize("limit", [4, 7, 60])
def test_an_ollama_stream_is_the_whole_answer(dspark: Served, limit: int) -> None:
    text, last = ollama(dspark, stream=True, temperature=0, num_predict=limit)
    whole, end = ollama(dspark, stream=False, temperature=0, num_predict=limit)
    assert text == whole != ""
    for key in ("done_reason", "eval_count", "prompt_eval_count"):
        assert last[key] == end[key]
    assert end["done_reason"] == ("length" if end["eval_count"] == limit else "stop")


def test_num_predict_without_limit(dspark: Served) -> None:
    _, end = ollama(dspark, stream=False, temperature=0, num_predict=-1, stop=["", "."])
    assert end["done_reason"] == "stop"
    assert end["eval_count"] > 1


@pytest.mark.parametrize("sampling", [{"stop": ""}, {"stop": ["", "qqq"]}, {"stop_regex": ""}])
def test_an_empty_stop_is_ignored(dspark: Served, sampling: dict[str, Any]) -> None:
    free = dspark.generate("Once upon", max_new_tokens=8)
    answer = dspark.generate("Once upon", max_new_tokens=8, sampling_params=sampling)
    assert answer["text"] == free["text"]


@pytest.mark.parametrize("stream", [True, False])
def test_anthropics_stop_sequence_is_reported(dspark: Served, stream: bool) -> None:
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "List three fruits."}],
        "max_tokens": 64,
        "temperature": 0,
        "stop_sequences": ["."],
        "stream": stream,
    }
    answer = dspark.request("POST", "/v1/messages", json=body)
    assert answer.status_code == 200, answer.text[:300]
    assert '"stop_reason":"stop_sequence"' in answer.text.replace(": ", ":")
    assert '"stop_sequence":"."' in answer.text.replace(": ", ":")


def test_responses_get_all_their_tokens(dspark: Served) -> None:
    name = dspark.request("GET", "/v1/models").json()["data"][0]["id"]
    body = {"model": name, "input": "List three fruits.", "max_output_tokens": 4}
    answer = dspark.request("POST", "/v1/responses", json=body).json()
    assert answer["usage"]["output_tokens"] == 4


def test_an_invalid_body_names_no_file(dspark: Served) -> None:
    body = {"model": "default", "prompt": "x", "max_tokens": 0}
    answer = dspark.request("POST", "/v1/completions", json=body)
    assert answer.status_code == 400
    assert "must be positive" in answer.text
    assert "http_server.py" not in answer.text
