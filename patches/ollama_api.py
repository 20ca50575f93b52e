"""Sends whole answers, their ends' reasons and counts by Ollama's interface.

The hooks: `sglang_dspark/serving/ollama_api.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import ollama_api

_SERVING = "sglang.srt.entrypoints.ollama.serving.OllamaServing"
_ANSWER = "(self, gen_request, raw_request, model_name)"

SEAMS = (
    Seam(
        name="ollama-options",
        target=f"{_SERVING}._convert_options_to_sampling_params",
        kind="after",
        hook=ollama_api.convert_options,
        signature="(self, options=None)",
        why="upstream answers Ollama's num_predict -1, which is no limit, with 500",
    ),
    Seam(
        name="ollama-chat",
        target=f"{_SERVING}._generate_chat_response",
        kind="replace",
        hook=ollama_api.answer_chat,
        signature=_ANSWER,
        why="upstream says done_reason stop of an answer that max_new_tokens cut off",
    ),
    Seam(
        name="ollama-generate",
        target=f"{_SERVING}._generate_generate_response",
        kind="replace",
        hook=ollama_api.answer_generate,
        signature=_ANSWER,
        why="upstream says done_reason stop of an answer that max_new_tokens cut off",
    ),
    Seam(
        name="ollama-chat-stream",
        target=f"{_SERVING}._stream_chat_response",
        kind="replace",
        hook=ollama_api.stream_chat,
        signature=_ANSWER,
        why="upstream drops the text of the last chunk, up to gamma + 1 tokens under DSPARK",
    ),
    Seam(
        name="ollama-generate-stream",
        target=f"{_SERVING}._stream_generate_response",
        kind="replace",
        hook=ollama_api.stream_generate,
        signature=_ANSWER,
        why="upstream drops the text of the last chunk, up to gamma + 1 tokens under DSPARK",
    ),
)
