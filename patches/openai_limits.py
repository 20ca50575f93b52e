"""Keeps max_output_tokens as it is given, and server paths out of error messages.

The hooks: `sglang_dspark/serving/openai_limits.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import openai_limits

SEAMS = (
    Seam(
        name="responses-limit",
        target="sglang.srt.entrypoints.openai.protocol.ResponsesRequest.to_sampling_params",
        kind="after",
        hook=openai_limits.whole_limit,
        signature="(self, default_max_tokens=None, default_params=None, stop=None, "
        "tool_call_constraint=None)",
        why="upstream generates two tokens fewer than max_output_tokens",
    ),
    Seam(
        name="error-paths",
        target="fastapi.exceptions.ValidationException._format_endpoint_context",
        kind="replace",
        hook=openai_limits.without_endpoint,
        signature="(self)",
        why="upstream answers an invalid body with a path of the server's files",
    ),
)
