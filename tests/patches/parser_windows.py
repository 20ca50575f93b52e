"""Feed SGLang's streaming parsers every sequence of verify windows, without a server.

Plain decoding hands a parser one token a chunk. A DSPARK step hands it 1 to gamma + 1 tokens, which
`stream_pieces` splits again. All ways to cut a text of 60 tokens into windows are more than can be
run one by one, but nearly all leave a parser in the same state: the states behind each token are
collected, and each is continued with each window.
"""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace
from typing import Any

from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.json_array_parser import JsonArrayParser
from sglang.srt.parser.beam import BEAM_RESPONSE_TEMPLATE
from sglang.srt.parser.reasoning_parser import ReasoningParser

GAMMA = 7
NO_FIELDS: dict[str, Any] = {"type": "object", "properties": {}}
FIELDS = NO_FIELDS | {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [
    Tool(type="function", function=Function(name=name, parameters=fields))
    for name, fields in (("ping", NO_FIELDS), ("weather", FIELDS), ("add", NO_FIELDS))
]
# The tokens of a model: its markers in whole, all else as Qwen's vocabulary splits a text before
# it merges bytes. A token may hold quotes, braces and a newline, such as `"}}\n`.
_MARKERS = (
    r"</?(?:tool_call|think|minimax:tool_call|mm:think|arg_key|arg_value|tool_calls|tool_sep"
    r"|iquest_tool_call)>|<\|[^<>|\s]+\|>|<｜[^<>｜]*｜>|｜(?:DSML|GCML)｜|</?ifm\|\w+>"
    r"|<\|(?:tool_call|channel)>|<(?:tool_call|channel)\|>|<\|\"\|>|\]<\]minimax\[>\["
    r"|\[/?[A-Z_]{2,}\]|◁/?think▷"
)
_TOKEN = re.compile(
    rf"{_MARKERS}|(?:[^\r\n\w]|_)?[^\W\d_]+|\d| ?(?:(?!{_MARKERS})(?:[^\s\w]|_))+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokens(text: str) -> list[str]:
    """Split a text as a model's vocabulary does."""
    found = _TOKEN.findall(text)
    assert "".join(found) == text
    return found


@dataclass
class Stream:
    """A streamed answer as a client puts it together: the chat handler's parsers, and its texts.

    reasoning, tools: SGLang's parsers, or None.
    """

    reasoning: ReasoningParser | None = None
    tools: FunctionCallParser | JsonArrayParser | None = None
    thoughts: str = ""
    text: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)

    def feed(self, chunk: str) -> None:
        if self.reasoning is not None:
            thoughts, rest = self.reasoning.parse_stream_chunk(chunk)
            self.thoughts += thoughts or ""
            chunk = rest or ""
        self._feed_tools(chunk)

    def end(self) -> None:
        """Flush what the parsers hold back, as the chunk with the finish reason does."""
        if self.reasoning is not None:
            thoughts, rest = self.reasoning.parse_stream_end()
            self.thoughts += thoughts or ""
            self._feed_tools(rest or "")
        if isinstance(self.tools, JsonArrayParser):
            ended = self.tools.finish(TOOLS)
            self._add(ended.normal_text, ended.calls)
        elif self.tools is not None:
            self._add(*self.tools.parse_stream_end())

    def answer(self) -> tuple[str, list[tuple[str, Any]], str]:
        """Return reasoning, names and arguments of the calls, and text."""
        calls = [(name, json.loads(given or "{}")) for name, given in self.calls.values()]
        return self.thoughts, calls, self.text

    def _feed_tools(self, chunk: str) -> None:
        if self.tools is None:
            self.text += chunk
        elif isinstance(self.tools, JsonArrayParser):
            parsed = self.tools.parse_streaming_increment(chunk, TOOLS)
            self._add(parsed.normal_text, parsed.calls)
        else:
            self._add(*self.tools.parse_stream_chunk(chunk))

    def _add(self, text: str, found: Sequence[Any]) -> None:
        self.text += text or ""
        for call in found:
            known = self.calls.setdefault(call.tool_index, ["", ""])
            known[0] += call.name or ""
            known[1] += call.parameters


def tool_parser(name: str) -> FunctionCallParser:
    return FunctionCallParser(TOOLS, name, _tokenizer(name))


def reasoning_parser(name: str, calling: bool = False) -> ReasoningParser:
    """Return SGLang's parser. calling: whether a tool-call parser gets the text behind it."""
    return ReasoningParser(name, tokenizer=_tokenizer(name), tool_call_parser_active=calling)


def _tokenizer(parser: str) -> Any:
    """Return a model's tokenizer where the parser reads its format there."""
    template = SimpleNamespace(response_template=BEAM_RESPONSE_TEMPLATE)
    return template if parser == "response_template" else None


def token_by_token(stream: Stream, text: str) -> Stream:
    """Return the stream after the text in plain decoding's chunks."""
    for token in tokens(text):
        stream.feed(token)
    stream.end()
    return stream


def all_windows(stream: Stream, text: str, cut: Callable[[str], list[str]]) -> list[Stream]:
    """Return the different streams that some sequence of windows ends in.

    A window has 1 to GAMMA + 1 tokens or, at every fourth token, all that are left. cut: returns a
    window's chunks.
    """
    cut_text = tokens(text)
    count = len(cut_text)
    states: list[dict[bytes, Stream]] = [{}, *({} for _ in cut_text)]
    states[0][pickle.dumps(stream)] = stream
    for at, before in enumerate(states[:-1]):
        ends = set(range(at + 1, min(at + GAMMA + 1, count) + 1))
        ends |= {count} if at % 4 == 0 else set()
        for state, end in product(before.values(), ends):
            fed = copy.deepcopy(state)
            for chunk in cut("".join(cut_text[at:end])):
                fed.feed(chunk)
            states[end].setdefault(pickle.dumps(fed), fed)
    ended = list(states[-1].values())
    for each in ended:
        each.end()
    return ended
