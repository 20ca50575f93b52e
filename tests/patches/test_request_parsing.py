"""Test requests that raise while they are read: one line names the field; no other is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fastapi import HTTPException
from fastapi.dependencies.utils import _validate_value_with_model_field
from fastapi.routing import APIRoute
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_dspark.patches.upstream_fixes.request_parsing import (
    MOST_TRIED,
    convert,
    normalize,
    validate,
)

UNHOOKED = GenerateReqInput.normalize_batch_and_arguments
UNHOOKED = getattr(UNHOOKED, "__wrapped__", UNHOOKED)


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("sampling_params", {"text": "a", "sampling_params": []}),
        ("sampling_params", {"text": ["a", "b"], "sampling_params": [{"temperature": 0}]}),
        ("audio_data", {"text": [""], "audio_data": []}),
        ("return_logprob", {"text": ["a"], "stream": True, "rid": ["x"], "return_logprob": []}),
        ("lora_path", {"text": ["a", "b"], "lora_path": ["x"]}),
        ("input_embeds", {"input_embeds": [], "sampling_params": {}}),
        ("sampling_params", {"text": "a", "sampling_params": [{"temperature": 0}]}),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(field: str, fields: dict[str, Any]) -> None:
    said = rf"^{field}: .* does not fit this request \((Index|Type)Error"
    with pytest.raises(ValueError, match=said):
        normalize(UNHOOKED, GenerateReqInput(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"text": "a"},
        {
            "text": ["a", "b"],
            "sampling_params": [{"n": 1}, {"n": 1}],
            "return_logprob": [True, False],
        },
        {"input_ids": [[1], [2]], "extra_key": ["x", "y"], "image_data": []},
    ],
)
def test_what_upstream_takes_is_taken_and_left_as_upstream_leaves_it(
    fields: dict[str, Any],
) -> None:
    fields = {"rid": "r", **fields}
    hooked, plain = GenerateReqInput(**fields), GenerateReqInput(**fields)
    normalize(UNHOOKED, hooked)
    UNHOOKED(plain)
    assert vars(hooked) == vars(plain)
    hooked.priority = 7  # upstream does so next; every part must have it
    assert hooked.is_single or hooked[0].priority == 7


def test_what_upstream_refuses_keeps_upstreams_words() -> None:
    with pytest.raises(
        ValueError, match=r"Either text, input_ids or input_embeds should be provided"
    ):
        normalize(UNHOOKED, GenerateReqInput())


def test_no_more_fields_are_tried_than_allowed() -> None:
    tries = 0

    def always(request: GenerateReqInput) -> None:
        nonlocal tries
        tries += 1
        raise KeyError("x")

    many = {name: ["x"] for name in ("rid", "lora_path", "extra_key", "cache_salt", "text")}
    more = {name: [1] for name in ("top_logprobs_num", "logprob_start_len", "bootstrap_port")}
    flags = {"stream": True, "return_entropy": True, "no_logs": True}
    with pytest.raises(ValueError, match=r"^the request cannot be read \(KeyError: 'x'\)"):
        normalize(always, GenerateReqInput(**many, **more, **flags))
    assert tries == 1 + MOST_TRIED


async def _endpoint(request: ChatCompletionRequest) -> None: ...


def read(body: Any) -> Any:
    """Return what FastAPI makes of the body of a chat: the request, and errors."""
    (field,) = APIRoute("/", _endpoint, methods=["POST"]).dependant.body_params
    function = _validate_value_with_model_field
    original = getattr(function, "__wrapped__", function)
    return validate(original, field=field, value=body, values={}, loc=("body",))


CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ([], r"^the body must be a JSON object, not \[\]$"),
        (None, "^the body must be a JSON object, not None$"),
        ({**CHAT, "response_format": "x"}, "^response_format: 'x' does not fit this request"),
    ],
)
def test_a_body_that_a_validator_chokes_on_is_a_400(body: Any, says: str) -> None:
    with pytest.raises(HTTPException) as caught:
        read(body)
    assert caught.value.status_code == 400
    assert re.search(says, caught.value.detail), caught.value.detail


def test_other_bodies_are_read_as_before() -> None:
    request, errors = read(CHAT)
    assert not errors
    assert request.messages[0].content == "x"
    _, errors = read({**CHAT, "messages": 5})
    assert errors[0]["loc"] == ("body", "messages")


def test_a_chat_that_cannot_be_rendered_is_refused_by_name() -> None:
    def original(self: Any, request: ChatCompletionRequest, raw_request: Any) -> str:
        for name in request.chat_template_kwargs or {}:
            raise KeyError(name)
        return "rendered"

    odd = ChatCompletionRequest(**CHAT, logit_bias={"5": 1}, chat_template_kwargs={"messages": []})
    with pytest.raises(ValueError, match=r"^chat_template_kwargs: .*KeyError: 'messages'"):
        convert(original, None, odd)
    assert convert(original, None, ChatCompletionRequest(**CHAT)) == "rendered"


def test_a_fault_of_the_servers_own_stays_one() -> None:
    def original(self: Any, request: Any, raw_request: Any) -> None:
        raise OSError("no tokenizer any more")

    with pytest.raises(OSError, match="no tokenizer"):
        convert(original, None, ChatCompletionRequest(**CHAT))
