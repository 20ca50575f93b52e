"""Feed streamed text to tool-call and reasoning parsers in pieces no longer than a token.

Upstream's parsers handle one state a call: a chunk that contains the end of one tool call and the
start of another, or text next to a call, loses calls, arguments or text. This affects the parsers
of DeepSeek, GLM, Hermes, Llama, MiMo, Mistral and Qwen. A chunk's text and calls have no order: the
chat handler (sglang/srt/entrypoints/openai/serving_chat.py) sends text first, and `/v1/messages`
then drops the arguments after it. A `<tool_call>` in reasoning ends it unless `</think>` is in the
same chunk. One token a chunk is parsed correctly; a DSPARK step emits up to gamma + 1.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from itertools import accumulate
from typing import Any

from sglang_dspark.patches.seam import Seams
from sglang_dspark.serving import upstream

_OPENAI = "sglang.srt.entrypoints.openai"
SEAMS = Seams(
    why="upstream's streaming parsers lose calls, arguments and text of a chunk of several tokens, "
    "which every speculative step sends (sglang#37634, sglang#35564)",
    issue="sgl-project/sglang#31915, sgl-project/sglang#37634, sgl-project/sglang#35564",
    drop_when="upstream's parsers return the parts of a chunk in order, in any number of states",
)
# Whole markers of formats (`<tool_call>`, `<|python_tag|>`, `[TOOL_CALLS]`), which parsers wait
# for and vocabularies have as one token; then words with their space; then JSON's signs with the
# line breaks after them, which Hermes would send as text between calls; then single characters.
PIECE = re.compile(r"</?[^<>\s]{1,40}>|\[/?[A-Z_]{2,}\]| ?\w+|[{}\[\]\",][\r\n]+|.", re.DOTALL)
# A chunk without these, like most chunks of an answer, changes no parser's state.
_STRUCTURE = re.compile(r"[<>\[\]{}()|\"`;\n]")

Stream = AsyncIterator[Any]


def pieces(text: str) -> list[str]:
    """Split a chunk into pieces; an empty chunk, which flushes buffered text, is one piece."""
    return (PIECE.findall(text) if _STRUCTURE.search(text) else None) or [text]


@SEAMS.around(
    "chat-pieces",
    f"{_OPENAI}.serving_chat.OpenAIServingChat._generate_stream_content",
    signature="async for (self, content, index, request, created, stream_offsets, "
    "reasoning_parser_dict, parser_dict, has_tool_calls, choice_logprobs, finish_reason_type, "
    "continuous_usage_stats, prompt_tokens, reasoning_tokens, completion_tokens)",
)
async def chat_content(original: Callable[..., Stream], self: Any, **named: Any) -> Stream:
    """Call upstream's method for each piece of a chunk (AROUND hook of `_generate_stream_content`).

    named: upstream's keyword arguments. The first piece has the chunk's logprobs, the last one its
    finish reason.
    """
    content, request = named["content"], named["request"]
    parsed = self._tool_call_parsing_active(request) or (
        self.reasoning_parser and request.separate_reasoning
    )
    parts = [content["text"]]
    if parsed and not _parses_whole_chunks(self, request):
        parts = _texts(content["text"], named["stream_offsets"].get(named["index"], 0))
    logprobs, end = named["choice_logprobs"], named["finish_reason_type"]
    for number, text in enumerate(parts, 1):
        named["content"] = {**content, "text": text}
        named["choice_logprobs"] = logprobs if number == 1 else None
        named["finish_reason_type"] = end if number == len(parts) else None
        async for event in original(self, **named):
            yield event


@SEAMS.around(
    "response-pieces",
    f"{_OPENAI}.serving_responses.OpenAIServingResponses._responses_stream_generator_non_harmony",
    signature="async for (self, request, sampling_params, result_generator, model_name, tokenizer, "
    "request_metadata, created_time=None, *, require_reasoning, tool_adapter=None)",
)
async def response_events(
    original: Callable[..., Stream],
    self: Any,
    request: Any,
    sampling_params: Any,
    result_generator: Stream,
    *given: Any,
    **named: Any,
) -> Stream:
    """Split chunks into pieces (AROUND hook of `_responses_stream_generator_non_harmony`)."""
    if (self.reasoning_parser or request.tools) and not _parses_whole_chunks(self, request):
        result_generator = _split(result_generator)
    async for event in original(self, request, sampling_params, result_generator, *given, **named):
        yield event


async def _split(chunks: Stream) -> Stream:
    """Yield the pieces of each chunk as chunks; only the last piece has the finish reason.

    chunks: the tokenizer manager's, or upstream's contexts with one in `last_output`.
    """
    sent = 0
    async for context in chunks:
        chunk = context if isinstance(context, dict) else getattr(context, "last_output", None)
        if not isinstance(chunk, dict):
            continue
        text = chunk.get("text") or ""
        parts = _texts(text, sent)
        sent = len(text)
        unfinished = {**(chunk.get("meta_info") or {}), "finish_reason": None}
        for part in parts[:-1]:
            yield {**chunk, "text": part, "meta_info": unfinished}
        yield {**chunk, "text": parts[-1]}


def _texts(text: str, sent: int) -> list[str]:
    """Return each piece's text in upstream's form: the piece alone, or all text up to its end.

    sent: characters of `text` that were in earlier chunks, where a chunk has the whole text.
    """
    if upstream.get_serving().incremental_streaming_output:
        return pieces(text)
    ends = accumulate(map(len, pieces(text[sent:])), initial=sent)
    return [text[:end] for end in ends][1:]


def _parses_whole_chunks(self: Any, request: Any) -> bool:
    """Return whether the output is parsed by token ids or by a grammar of the chat template.

    Such parsers handle several states a chunk, and a stop token is cut off a whole chunk's text.
    """
    return bool(
        self._encoding_output() is not None
        or request._response_parser_grammar_start is not None
        or request._response_parser_tool_grammar
    )
