"""Answer an exception while a request is read with status 400 and the field at fault, not 500.

Upstream answers a ValueError with status 400 and every other exception with 500. For a request
whose parts are inconsistent (a list shorter than the prompts, `sampling_params: []`,
`chat_template_kwargs: {"messages": []}`) it raises IndexError, KeyError, TypeError. Every JSON body
passes FastAPI's `_validate_value_with_model_field`, every chat and completion
`_convert_to_internal_request`, every generation `normalize_batch_and_arguments`.

Requests that upstream accepts are not refused here: only those that raise get another answer. The
field at fault is the first one without which the exception does not occur.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.common.files import brief
from sglang_dspark.patches.seam import Seams

_OPENAI = "sglang.srt.entrypoints.openai"
SEAMS = Seams(
    why="upstream answers an exception while a request is read with 500, as a fault of its own",
    issue="none found (2026-11-27)",
    drop_when="upstream answers exceptions of a request's own values with status 400",
)
# Python raises these for inconsistent values. ValueError already gets 400; OSError and
# RuntimeError may be faults of the server.
FAULTS = (TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RecursionError)
MOST_TRIED = 8  # fields to try: each costs as much as reading the request
PROMPTS = ("text", "input_ids", "input_embeds", "prompt", "messages")
Fields = dict[str, Any]


@SEAMS.around("request-body", "fastapi.dependencies.utils._validate_value_with_model_field")
def validate(original: Callable[..., Any], *, field: Any, value: Any, values: Any, loc: Any) -> Any:
    """Answer 400 if a validator raises (AROUND hook of FastAPI's `_validate_value_...`).

    value: the JSON body.
    """
    from fastapi import HTTPException

    def read(body: Any) -> Any:
        return original(field=field, value=body, values=values, loc=loc)

    try:
        return read(value)
    except FAULTS as error:
        if isinstance(value, dict):
            raise HTTPException(400, _message(value, read, error)) from None
        what = f"the body must be a JSON object, not {brief(repr(value), 60)}"
        raise HTTPException(400, what) from None


@SEAMS.around(
    "request-completion",
    f"{_OPENAI}.serving_completions.OpenAIServingCompletion._convert_to_internal_request",
)
@SEAMS.around(
    "request-chat", f"{_OPENAI}.serving_chat.OpenAIServingChat._convert_to_internal_request"
)
def convert(original: Callable[..., Any], self: Any, request: Any, raw_request: Any = None) -> Any:
    """Turn one of `FAULTS` into a ValueError (AROUND hook of `_convert_to_internal_request`).

    request: the validated body, a pydantic model.
    """

    def read(fields: Fields) -> None:
        original(self, type(request).model_construct(**fields), raw_request)

    try:
        return original(self, request, raw_request)
    except FAULTS as error:
        given = {name: getattr(request, name) for name in request.model_fields_set}
        raise ValueError(_message(given, read, error)) from None


@SEAMS.around(
    "request-parts", "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments"
)
def normalize(original: Callable[..., Any], self: Any) -> None:
    """Turn one of `FAULTS` into a ValueError (AROUND hook of `normalize_batch_and_arguments`).

    Upstream may also raise one when it makes the requests of several prompts.
    """

    def read(fields: Fields) -> None:
        _normalize(original, type(self)(**fields))

    before = dict(vars(self))  # upstream fills in missing fields
    try:
        _normalize(original, self)
    except FAULTS as error:
        # A field's default is an attribute of the class. What is no field has none.
        given = {n: v for n, v in before.items() if v is not getattr(type(self), n, v)}
        raise ValueError(_message(given, read, error)) from None


def _normalize(original: Callable[..., Any], request: Any) -> None:
    original(request)
    if request.is_single and not isinstance(request.sampling_params, dict):
        # Upstream reads it as a mapping much later and then answers 500.
        raise TypeError("one prompt and one answer take one mapping")
    if not request.is_single:
        for number in range(len(request.rid)):
            request[number]
        # Fields that upstream sets on the whole request later must be in the parts too.
        vars(request).pop("_sub_obj_cache", None)


def _message(given: Fields, read: Callable[[Fields], Any], error: Exception) -> str:
    """Return the message on a request's fields that `read` answers with `error`."""
    reason = brief(f"{type(error).__name__}: {error}")

    def order(name: str) -> tuple[bool, bool]:  # lists and mappings first, prompts last
        return name in PROMPTS, not isinstance(given[name], list | dict)

    for name in sorted(given, key=order)[:MOST_TRIED]:
        try:
            read({other: value for other, value in given.items() if other != name})
        except FAULTS:
            continue
        except Exception:  # another error: reading got further, or the field is required
            pass
        hint = "; a list has one entry a prompt" if isinstance(given[name], list) else ""
        return f"{name}: {brief(repr(given[name]), 60)} does not fit this request ({reason}){hint}"
    return f"the request cannot be read ({reason}); look at the types of its fields"
