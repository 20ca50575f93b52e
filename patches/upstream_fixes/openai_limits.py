"""Give `/v1/responses` all tokens that it requests, and remove server paths from error messages.

Upstream: `ResponsesRequest.to_sampling_params` (sglang/srt/entrypoints/openai/protocol.py)
subtracts two tokens from `max_output_tokens`. The handler of a body that does not validate answers
`str(error)`, in which FastAPI names the file, line and function of the endpoint.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.patches.seam import Seams

SEAMS = Seams()


@SEAMS.after(
    "responses-limit",
    "sglang.srt.entrypoints.openai.protocol.ResponsesRequest.to_sampling_params",
    signature="(self, default_max_tokens=None, default_params=None, stop=None, "
    "tool_call_constraint=None)",
    why="upstream generates two tokens fewer than max_output_tokens",
    issue="sgl-project/sglang#26158",
    drop_when="upstream generates up to max_output_tokens, not two tokens fewer",
)
def whole_limit(
    result: dict[str, Any], self: Any, default_max_tokens: int | None = None, *_: Any, **__: Any
) -> None:
    """AFTER hook of `ResponsesRequest.to_sampling_params`: set the requested limit.

    A limit beyond the context gets status 400, as from `/v1/chat/completions`.
    """
    limits = [each for each in (self.max_output_tokens, default_max_tokens) if each is not None]
    if self.max_output_tokens is not None:
        result["max_new_tokens"] = min(limits)


@SEAMS.replace(
    "error-paths",
    "fastapi.exceptions.ValidationException._format_endpoint_context",
    why="upstream answers an invalid body with a path of the server's files",
    issue="https://github.com/fastapi/fastapi/pull/14306",
    drop_when="SGLang's handler of invalid bodies answers without str(error)",
)
def without_endpoint(self: Any) -> str:
    """REPLACE hook of FastAPI's `ValidationException._format_endpoint_context`: return no text."""
    return ""
