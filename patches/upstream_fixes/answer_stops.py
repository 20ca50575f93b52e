"""End answers at the stop that plain decoding finds, and report which stop it was.

Upstream looks for stops in all tokens that a step accepted (sglang/srt/managers/schedule_batch.py,
`Req.update_finish_state`): for one stop string after the other, and for stop tokens only if no
string occurs. With `{"stop": ["user"]}` a window of `<eos>`, `\\n`, `user` ends the answer before
`user`, where plain decoding ends it at `<eos>`; of two strings the first in the list wins. An empty
stop is in every text (sglang#38712): clients send it for "no stop", and OpenAI's API ignores it.

`/v1/messages` (sglang/srt/entrypoints/anthropic/serving.py) maps the finish reason "stop" to
"end_turn" and drops `matched_stop`, in which the chat handler names the stop.
"""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from sglang_dspark.patches.seam import Seams, Upstream

SEAMS = Seams()


@SEAMS.subclass(
    "anthropic-stop",
    "sglang.srt.entrypoints.anthropic.serving.AnthropicServing",
    why="upstream reports end_turn for an answer that one of its stop_sequences ended",
    issue="sgl-project/sglang#33153",
    drop_when="upstream's /v1/messages reports stop_sequence and the sequence that matched",
)
class AnthropicServing(Upstream):
    """Upstream's handler of `/v1/messages`, with the stop reason `stop_sequence`."""

    async def _handle_non_streaming(
        self, chat_request: Any, anthropic_request: Any, raw_request: Any
    ) -> Any:
        stops = anthropic_request.stop_sequences or ()

        def convert(response: Any) -> Any:
            result = self._convert_response(response)
            matched = response.choices[0].matched_stop if response.choices else None
            if result.stop_reason == "end_turn" and matched in stops:
                result.stop_reason, result.stop_sequence = "stop_sequence", matched
            return result

        watched = copy.copy(self)
        watched._convert_response = convert
        return await super(AnthropicServing, watched)._handle_non_streaming(
            chat_request, anthropic_request, raw_request
        )

    async def _generate_anthropic_stream(
        self, adapted_request: Any, processed_request: Any, anthropic_request: Any, raw_request: Any
    ) -> AsyncIterator[str]:
        stops, matched = anthropic_request.stop_sequences or (), None

        async def watch(*given: Any) -> AsyncIterator[str]:
            nonlocal matched
            async for line in self.openai_serving_chat._generate_chat_stream(*given):
                if '"matched_stop":' in line:  # few lines are parsed twice
                    for choice in json.loads(line.removeprefix("data: ")).get("choices") or ():
                        matched = choice.get("matched_stop") or matched
                yield line

        watched = copy.copy(self)
        watched.openai_serving_chat = SimpleNamespace(_generate_chat_stream=watch)
        async for frame in super(AnthropicServing, watched)._generate_anthropic_stream(
            adapted_request, processed_request, anthropic_request, raw_request
        ):
            if frame.startswith("event: message_delta\n") and matched in stops:
                stop = f'"stop_reason":"stop_sequence","stop_sequence":{json.dumps(matched)}'
                yield frame.replace('"stop_reason":"end_turn"', stop)
            else:
                yield frame


@SEAMS.before(
    "empty-stops",
    "sglang.srt.sampling.sampling_params.SamplingParams.normalize",
    why="upstream ends an answer with an empty stop string at its first token (sglang#38712)",
    issue="sgl-project/sglang#38712",
    drop_when="upstream ignores or refuses empty stop strings and patterns",
)
def drop_empty(self: Any, tokenizer: Any) -> None:
    """Drop empty stops, for every API (BEFORE hook of `SamplingParams.normalize`)."""
    self.stop_strs = _without_empty(self.stop_strs)
    self.stop_regex_strs = _without_empty(self.stop_regex_strs)


def _without_empty(stops: str | list[str] | None) -> str | list[str] | None:
    return [each for each in stops if each] if isinstance(stops, list) else stops or None


_PART = "\ufffd"  # a tokenizer decodes bytes of an incomplete character to this


@SEAMS.around(
    "first-stop",
    "sglang.srt.managers.schedule_batch.Req.update_finish_state",
    signature="(self, new_accepted_len=1)",
    why="of two stops in one accepted window the later one may win, unlike in plain decoding",
    issue="sgl-project/sglang#28802",
    drop_when="upstream ends an answer at the earliest stop of the accepted tokens",
)
def end_at_the_first(original: Callable[..., None], req: Any, new_accepted_len: int = 1) -> None:
    """Call upstream's method for one token after the other (AROUND hook of `update_finish_state`).

    Tokens after the end stay in `output_ids`, as their slots are in use; `finished_len` excludes
    them from the answer. The grammar has already accepted the whole window.
    """
    sampling = req.sampling_params
    if new_accepted_len < 2 or not (sampling.stop_strs or sampling.stop_regex_strs):
        return original(req, new_accepted_len)
    if req.finished() or req.to_finish or not _may_stop(req, new_accepted_len):
        return original(req, new_accepted_len)
    tokens, grammar = req.output_ids, req.grammar
    window = tokens[-new_accepted_len:]
    del tokens[-new_accepted_len:]
    for seen, token in enumerate(window, 1):
        tokens.append(token)
        req.grammar = grammar if seen == new_accepted_len else None
        original(req)
        if req.finished():
            break
    if req.finished() and req.finished_len is None:
        req.finished_len = len(tokens)
    req.grammar = grammar
    tokens.extend(window[seen:])


def _may_stop(req: Any, fresh: int) -> bool:
    """Return whether a stop string or pattern may end a prefix of the window, after one decoding.

    A pattern may match only in a prefix; so may a string in bytes that the next token completes to
    another character. An invalid token must be replaced before it is decoded.
    """
    strings, window = req.sampling_params.stop_strs, req.output_ids[-fresh:]
    if req.sampling_params.stop_regex_strs or min(window) < 0 or max(window) >= req.vocab_size:
        return True
    tail = req.tail_str(fresh)
    return any(each in tail or _PART in each for each in strings) or _PART in tail
