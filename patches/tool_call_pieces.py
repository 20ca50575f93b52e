"""Parses streamed tool calls right when a chunk holds several tokens.

The hook: `sglang_dspark/serving/tool_call_pieces.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import tool_call_pieces

SEAMS = (
    Seam(
        name="tool-call-pieces",
        target="sglang.srt.function_call.function_call_parser.FunctionCallParser.parse_stream_chunk",
        kind="around",
        hook=tool_call_pieces.parse_chunk,
        signature="(self, chunk_text)",
        why=(
            "upstream's streaming parser loses arguments of a chunk of several tokens, which every "
            "speculative step sends (sglang#37634, sglang#35564)"
        ),
    ),
)
