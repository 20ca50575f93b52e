"""Ollama's interface: a stream carries the whole answer, the reason of its end and its counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from fastapi import HTTPException
from sglang.srt.entrypoints.ollama import serving as upstreams
from sglang.srt.entrypoints.ollama.protocol import OllamaGenerateRequest

from sglang_dspark.patches.upstream_fixes import other_apis as patch
from tests.patches.hooked import put_in

CUT = {"type": "length", "length": 5}


class Manager:
    """A tokenizer manager whose answer grows by the given pieces, a step each."""

    served_model_name = "demo"

    def __init__(self, pieces: Sequence[str], reason: dict[str, Any], error: str = ""):
        self.pieces, self.reason, self.error = pieces, reason, error
        self.sampling: dict[str, Any] = {}

    async def generate_request(self, asked: Any, _: Any) -> AsyncIterator[dict[str, Any]]:
        self.sampling = asked.sampling_params
        if self.error:
            raise ValueError(self.error)
        for seen in range(1, len(self.pieces) + 1) if asked.stream else [len(self.pieces)]:
            meta: dict[str, Any] = {"prompt_tokens": 3, "completion_tokens": 2 * seen}
            meta["finish_reason"] = self.reason if seen == len(self.pieces) else None
            yield {"text": "".join(self.pieces[:seen]), "meta_info": meta}


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, patch.SEAMS[:1])


def ask(manager: Manager, *, stream: bool, **options: Any) -> list[dict[str, Any]]:
    """The lines of an answer to /api/generate."""

    async def lines() -> list[dict[str, Any]]:
        request = OllamaGenerateRequest(model="demo", prompt="Hi", stream=stream, options=options)
        answer = await upstreams.OllamaServing(manager).handle_generate(request, None)  # type: ignore[arg-type]
        if not stream:
            return [answer.model_dump()]
        return [json.loads(each) async for each in answer.body_iterator]

    return asyncio.run(lines())


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("pieces", [["Hello", " you", "?"], ["Hello you?"], ["Hello you?", ""]])
@pytest.mark.parametrize(("reason", "said"), [(CUT, "length"), ({"type": "stop"}, "stop")])
def test_the_whole_answer_is_sent(
    pieces: list[str], reason: dict[str, Any], said: str, stream: bool
) -> None:
    lines = ask(Manager(pieces, reason), stream=stream)
    assert "".join(line["response"] for line in lines) == "Hello you?"
    assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
    assert lines[-1]["done_reason"] == said
    assert lines[-1]["prompt_eval_count"] == 3
    assert lines[-1]["eval_count"] == 2 * len(pieces)
    assert lines[-1]["model"] == "demo"


@pytest.mark.usefixtures("patched")
def test_a_chat_is_streamed_as_messages() -> None:
    async def lines() -> list[dict[str, Any]]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        asked = GenerateReqInput(input_ids=[1], sampling_params={}, stream=True)
        serving: Any = upstreams.OllamaServing(Manager(["Hi", "?"], CUT))  # type: ignore[arg-type]
        answer = await serving._stream_chat_response(asked, None, "demo")
        return [json.loads(each) async for each in answer.body_iterator]

    found = asyncio.run(lines())
    assert [line["message"]["content"] for line in found] == ["Hi", "?", ""]
    assert {line["message"]["role"] for line in found} == {"assistant"}


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize(("given", "limit"), [(-1, None), (-2, None), (7, 7), (-3, -3)])
def test_a_negative_num_predict_is_no_limit(given: int, limit: int | None) -> None:
    manager = Manager(["Hi"], CUT)
    ask(manager, stream=False, num_predict=given)
    assert manager.sampling["max_new_tokens"] == limit


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("stream", [True, False])
def test_a_refused_request_is_a_400(stream: bool) -> None:
    with pytest.raises(HTTPException) as refused:
        ask(Manager([], CUT, error="top_p must be in (0, 1]"), stream=stream)
    assert (refused.value.status_code, refused.value.detail) == (400, "top_p must be in (0, 1]")
