"""Feed streamed text to a tool-call parser in pieces no longer than a token.

Upstream (sglang/srt/function_call/base_format_detector.py) handles one state a call: it
sends a tool's name, and the arguments when the next chunk arrives. A chunk that holds both loses
arguments, a second call, or text next to a call (sglang#37634, sglang#35564). One token a chunk is
parsed right; a step under DSPARK emits up to gamma + 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import upstream

# Markers of formats in whole (`<tool_call>`, `<|python_tag|>`, `[TOOL_CALLS]`), which parsers wait
# for and vocabularies have as one token; then words with their space, then single characters.
PIECE = re.compile(r"</?[^<>\s]{1,40}>|\[/?[A-Z_]{2,}\]| ?\w+|.", re.DOTALL)

Calls = list[Any]


def parse_chunk(
    original: Callable[[Any, str], tuple[str, Calls]], self: Any, chunk_text: str
) -> tuple[str, Calls]:
    """AROUND hook of `parse_stream_chunk`: return normal text and calls of all pieces.

    Other detectors than those of `_parsed_by_state` have parsers of their own.
    """
    if not self.tools or not _parsed_by_state(self.detector):
        return original(self, chunk_text)
    return _joined(original(self, piece) for piece in pieces(chunk_text))


def pieces(text: str) -> list[str]:
    """Split a chunk; an empty one, which asks for what is buffered, is one piece."""
    return PIECE.findall(text) or [text]


def _joined(results: Iterable[tuple[str, Calls]]) -> tuple[str, Calls]:
    """Join parts of one call's arguments, so that a client gets as many events as before."""
    text: list[str] = []
    calls: Calls = []
    for normal, found in results:
        text.append(normal or "")
        for call in found:
            last = calls[-1] if calls else None
            if last and not last.name and not call.name and last.tool_index == call.tool_index:
                last.parameters += call.parameters
            else:
                calls.append(call)
    return "".join(text), calls


def _parsed_by_state(detector: Any) -> bool:
    """Return whether the base class parses the calls of this detector, one state a call."""
    return isinstance(
        detector,
        upstream.HermesDetector
        | upstream.Llama32Detector
        | upstream.MistralDetector
        | upstream.Qwen25Detector,
    )


SEAMS = (
    Seam(
        name="tool-call-pieces",
        target="sglang.srt.function_call.function_call_parser.FunctionCallParser.parse_stream_chunk",
        kind="around",
        hook=parse_chunk,
        signature="(self, chunk_text)",
        why=(
            "upstream's streaming parser loses arguments of a chunk of several tokens, which every "
            "speculative step sends (sglang#37634, sglang#35564)"
        ),
        issue="sgl-project/sglang#31915, sgl-project/sglang#37634, sgl-project/sglang#35564",
        drop_when="upstream's detectors parse a chunk with several states of a call",
    ),
)
