"""Reports the stop sequence that ended an answer of /v1/messages.

The hooks: `sglang_dspark/serving/anthropic_stops.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import anthropic_stops

_SERVING = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing"
_WHY = "upstream reports end_turn for an answer that one of its stop_sequences ended"

SEAMS = (
    Seam(
        name="anthropic-stop",
        target=f"{_SERVING}._handle_non_streaming",
        kind="around",
        hook=anthropic_stops.answer,
        signature="(self, chat_request, anthropic_request, raw_request)",
        why=_WHY,
    ),
    Seam(
        name="anthropic-stop-stream",
        target=f"{_SERVING}._generate_anthropic_stream",
        kind="around",
        hook=anthropic_stops.stream,
        signature="(self, adapted_request, processed_request, anthropic_request, raw_request)",
        why=_WHY,
    ),
)
