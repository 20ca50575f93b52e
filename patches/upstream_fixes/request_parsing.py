"""Answer an exception while a request is read with status 400 and the field at fault, not 500.

Upstream answers a ValueError with status 400 and every other exception with 500. For a request
whose parts are inconsistent (a list shorter than the prompts, `sampling_params: []`,
`chat_template_kwargs: {"messages": []}`) it raises IndexError, KeyError, TypeError. Every JSON body
passes FastAPI's `request_body_to_args`, every chat and completion `_convert_to_internal_request`,
every generation `normalize_batch_and_arguments`.

Requests that upstream accepts are not refused here: only those that raise get another answer. The
field at fault is the first one without which the exception does not occur.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields
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
FAULTS = (
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    RecursionError,
)
MOST_TRIED = 8  # fields to try: each costs as much as reading the request
PROMPTS = ("text", "input_ids", "input_embeds", "prompt", "messages")


@SEAMS.around(
    "request-body",
    "fastapi.dependencies.utils.request_body_to_args",
    signature="async (body_fields, received_body, embed_body_fields)",
)
async def read_body(original: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Answer 400 if a validator raises (AROUND hook of FastAPI's `request_body_to_args`).

    named: upstream's keyword arguments, with `received_body`, the JSON value.
    """
    from fastapi import HTTPException

    try:
        return await original(*given, **named)
    except FAULTS as error:
        body, found = named.get("received_body"), error
    if not isinstance(body, dict):
        what = f"the body must be a JSON object, not {brief(repr(body), 60)}"
        raise HTTPException(400, what)
    for name in _suspects(body):
        without = {other: value for other, value in body.items() if other != name}
        try:
            await original(*given, **{**named, "received_body": without})
        except FAULTS:
            continue
        raise HTTPException(400, _says(name, body[name], found))
    raise HTTPException(400, _says(None, None, found))


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
    try:
        return original(self, request, raw_request)
    except FAULTS as error:
        found = error
    given = {name: getattr(request, name) for name in request.model_fields_set}
    known = type(request).model_fields

    def again(name: str) -> None:
        default = known[name].get_default(call_default_factory=True)
        original(self, request.model_copy(update={name: default}), raw_request)

    optional = {n: v for n, v in given.items() if n in known and not known[n].is_required()}
    raise ValueError(_blamed(optional, again, found))


@SEAMS.around(
    "request-parts", "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments"
)
def normalize(original: Callable[..., Any], self: Any) -> None:
    """Turn one of `FAULTS` into a ValueError (AROUND hook of `normalize_batch_and_arguments`).

    Upstream may also raise one when it makes the requests of several prompts.
    """
    given = dict(vars(self))  # before upstream fills in missing fields
    try:
        _normalize(original, self)
        return
    except FAULTS as error:
        found = error
    defaults = {each.name: _default(each) for each in fields(self)}

    def again(name: str) -> None:
        other = object.__new__(type(self))
        vars(other).update({**given, name: defaults[name]})
        _normalize(original, other)

    said = {n: v for n, v in given.items() if n in defaults and v is not defaults[n]}
    raise ValueError(_blamed(said, again, found))


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


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def _blamed(given: Mapping[str, Any], again: Callable[[str], None], found: Exception) -> str:
    """Return the message on a request. again: reads it again without one of its fields."""
    for name in _suspects(given):
        try:
            again(name)
        except FAULTS:
            continue
        except Exception:  # another error: reading got further, or the field is required
            pass
        return _says(name, given[name], found)
    return _says(None, None, found)


def _suspects(given: Mapping[str, Any]) -> Iterable[str]:
    """Return at most `MOST_TRIED` field names to try: lists and mappings first, prompts last."""

    def order(name: str) -> int:
        return 2 if name in PROMPTS else int(not isinstance(given[name], list | dict))

    return sorted(given, key=order)[:MOST_TRIED]


def _says(name: str | None, value: Any, error: Exception) -> str:
    reason = brief(f"{type(error).__name__}: {error}")
    if name is None:
        return f"the request cannot be read ({reason}); look at the types of its fields"
    hint = "; a list has one entry a prompt" if isinstance(value, list) else ""
    return f"{name}: {brief(repr(value), 60)} does not fit this request ({reason}){hint}"
