"""One question to each API of a server: the answer as a client puts it together."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tests.integration.serving import Served

TOP = 2  # logprobs of so many tokens a position, where the API has them


@dataclass
class Asked:
    """A question.

    tools: JSON schema of the arguments by name. thinks: whether the answer begins with reasoning.
    schema: JSON schema of the answer, for APIs that accept one; {} is none. choice: "required", the
    name of the tool that must be called, both of strict tools, or "", the model's own choice.
    """

    prompt: str
    limit: int = 256
    stop: list[str] = field(default_factory=list)
    tools: dict[str, Any] = field(default_factory=dict)
    thinks: bool = False
    schema: dict[str, Any] = field(default_factory=dict)
    choice: str = ""

    def tool_choice(self, named: dict[str, Any], required: Any) -> dict[str, Any]:
        """Return the field of a request. named, required: an API's form of either choice."""
        if not self.choice:
            return {}
        return {"tool_choice": required if self.choice == "required" else named}


@dataclass
class Answer:
    """A client's view of an answer.

    calls: names and arguments of tool calls, arguments as their text. end: finish reason and what
    stopped the answer. events: parts that the stream had, 0 if it was none.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    end: Any = None
    usage: Any = None
    logprobs: Any = None
    events: int = 0


def events(server: Served, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the JSON values of a stream: server-sent events, or a value a line."""
    answer = server.request("POST", path, json=body)
    assert answer.status_code == 200, answer.text[:500]
    for line in answer.text.splitlines():
        data = line.removeprefix("data: ")
        if data.startswith("{"):
            value = json.loads(data)
            assert "error" not in value or value["error"] is None, value
            yield value


def whole(server: Served, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON value of an answer."""
    answer = server.request("POST", path, json=body)
    assert answer.status_code == 200, answer.text[:500]
    return answer.json()


def model_name(server: Served) -> str:
    """Return the served model's name, which `/v1/responses` requires."""
    return str(server.request("GET", "/v1/models").json()["data"][0]["id"])


def chat(server: Served, asked: Asked, stream: bool) -> Answer:
    """POST /v1/chat/completions."""
    body: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": asked.prompt}],
        "max_tokens": asked.limit,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": TOP,
        "stream": stream,
        "chat_template_kwargs": {"enable_thinking": asked.thinks},
    }
    if asked.stop:
        body["stop"] = asked.stop
    if asked.schema:
        form = {"name": "answer", "schema": asked.schema}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    if asked.tools:
        body["tools"] = [
            {
                "type": "function",
                "function": {"name": name, "parameters": schema, "strict": bool(asked.choice)},
            }
            for name, schema in asked.tools.items()
        ]
    named = {"type": "function", "function": {"name": asked.choice}}
    body |= asked.tool_choice(named, "required")
    path = "/v1/chat/completions"
    if not stream:
        done = whole(server, path, body)
        choice = done["choices"][0]
        message = choice["message"]
        return Answer(
            message["content"] or "",
            message.get("reasoning_content") or "",
            [
                [call["function"]["name"], call["function"]["arguments"]]
                for call in message.get("tool_calls") or ()
            ],
            [choice["finish_reason"], choice.get("matched_stop")],
            done["usage"],
            choice["logprobs"]["content"],
        )
    body["stream_options"] = {"include_usage": True}
    return _chat_stream(events(server, path, body))


def _chat_stream(chunks: Iterator[dict[str, Any]]) -> Answer:
    got = Answer(logprobs=[])
    for chunk in chunks:
        got.events += 1
        got.usage = chunk.get("usage") or got.usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            got.text += delta.get("content") or ""
            got.reasoning += delta.get("reasoning_content") or ""
            for call in delta.get("tool_calls") or ():
                while len(got.calls) <= call["index"]:
                    got.calls.append(["", ""])
                got.calls[call["index"]][0] += call["function"].get("name") or ""
                got.calls[call["index"]][1] += call["function"].get("arguments") or ""
            got.logprobs += (choice.get("logprobs") or {}).get("content") or ()
            if choice["finish_reason"]:
                got.end = [choice["finish_reason"], choice.get("matched_stop")]
    return got


def completions(server: Served, asked: Asked, stream: bool) -> Answer:
    """POST /v1/completions."""
    body: dict[str, Any] = {
        "model": "default",
        "prompt": asked.prompt,
        "max_tokens": asked.limit,
        "temperature": 0,
        "logprobs": TOP,
        "stream": stream,
    }
    if asked.stop:
        body["stop"] = asked.stop
    if stream:
        body["stream_options"] = {"include_usage": True}
        chunks = list(events(server, "/v1/completions", body))
    else:
        chunks = [whole(server, "/v1/completions", body)]
    got = Answer(usage=chunks[-1]["usage"], logprobs=[], events=len(chunks) if stream else 0)
    for choice in (each for chunk in chunks for each in chunk["choices"]):
        got.text += choice["text"]
        found = choice.get("logprobs") or {}
        got.logprobs += zip(
            found.get("tokens") or (), found.get("token_logprobs") or (), strict=True
        )
        if choice["finish_reason"]:
            got.end = [choice["finish_reason"], choice.get("matched_stop")]
    return got


def responses(server: Served, asked: Asked, stream: bool) -> Answer:
    """POST /v1/responses."""
    body: dict[str, Any] = {
        "model": model_name(server),
        "input": asked.prompt,
        "max_output_tokens": asked.limit,
        "temperature": 0,
        "stream": stream,
        "store": False,
        "chat_template_kwargs": {"enable_thinking": asked.thinks},
    }
    if asked.stop:
        body["stop"] = asked.stop
    if asked.schema:
        form = {"type": "json_schema", "name": "answer", "schema": asked.schema}
        body["text"] = {"format": form}
    if asked.tools:
        body["tools"] = [
            {"type": "function", "name": name, "parameters": schema, "strict": bool(asked.choice)}
            for name, schema in asked.tools.items()
        ]
    body |= asked.tool_choice({"type": "function", "name": asked.choice}, "required")
    if not stream:  # upstream refuses logprobs in streams
        body |= {"include": ["message.output_text.logprobs"], "top_logprobs": TOP}
    if not stream:
        return _response(whole(server, "/v1/responses", body))
    return _response_stream(events(server, "/v1/responses", body))


def _response(done: dict[str, Any]) -> Answer:
    got = Answer(usage=done["usage"], logprobs=[])
    got.end = [done["status"], done.get("incomplete_details")]
    for item in done["output"]:
        if item["type"] == "function_call":
            got.calls.append([item["name"], item["arguments"]])
        for part in item.get("content") or ():
            if item["type"] == "reasoning":
                got.reasoning += part["text"]
            else:
                got.text += part["text"]
                got.logprobs += part.get("logprobs") or ()
    return got


def _response_stream(chunks: Iterator[dict[str, Any]]) -> Answer:
    """Put the deltas together; the response in the last event has to say the same."""
    got, last = Answer(logprobs=[]), None
    calls: dict[int, list[str]] = {}
    for event in chunks:
        got.events += 1
        kind = event["type"]
        if kind == "response.output_text.delta":
            got.text += event["delta"]
            got.logprobs += event.get("logprobs") or ()
        elif kind == "response.reasoning_text.delta":
            got.reasoning += event["delta"]
        elif kind == "response.output_item.added" and event["item"]["type"] == "function_call":
            calls[event["output_index"]] = [event["item"]["name"], ""]
        elif kind == "response.function_call_arguments.delta":
            calls[event["output_index"]][1] += event["delta"]
        elif kind in ("response.completed", "response.incomplete"):
            last = _response(event["response"])
    assert last is not None
    got.calls = list(calls.values())
    got.end, got.usage = last.end, last.usage
    said = (got.text, got.reasoning, got.calls)
    assert said == (last.text, last.reasoning, last.calls), "deltas and last event differ"
    return got


def messages(server: Served, asked: Asked, stream: bool) -> Answer:
    """POST /v1/messages, Anthropic's API."""
    body: dict[str, Any] = {
        "model": "default",
        "messages": [{"role": "user", "content": asked.prompt}],
        "max_tokens": asked.limit,
        "temperature": 0,
        "stream": stream,
        "thinking": {"type": "adaptive" if asked.thinks else "disabled"},
    }
    if asked.stop:
        body["stop_sequences"] = asked.stop
    if asked.schema:
        body["output_config"] = {"format": {"type": "json_schema", "schema": asked.schema}}
    if asked.tools:
        body["tools"] = [
            {"name": name, "input_schema": schema} for name, schema in asked.tools.items()
        ]
    if not stream:
        done = whole(server, "/v1/messages", body)
        blocks, events_seen = done["content"], 0
    else:
        done, blocks, events_seen = _message_stream(events(server, "/v1/messages", body))
    got = Answer(events=events_seen, usage=done["usage"])
    got.end = [done["stop_reason"], done.get("stop_sequence")]
    for block in blocks:
        if block["type"] == "text":
            got.text += block["text"]
        elif block["type"] == "thinking":
            got.reasoning += block["thinking"]
        else:
            got.calls.append([block["name"], json.dumps(block["input"])])
    return got


def _message_stream(
    chunks: Iterator[dict[str, Any]],
) -> tuple[dict[str, Any], list[dict[str, Any]], int]:
    """Return the last event's fields, the content blocks and the number of events."""
    done: dict[str, Any] = {"usage": {}}
    blocks: list[dict[str, Any]] = []
    inputs: list[str] = []
    count = 0
    for event in chunks:
        count += 1
        match event["type"]:
            case "message_start":
                done["usage"] |= event["message"]["usage"]
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
                inputs.append("")
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                for name in ("text", "thinking"):
                    if name in event["delta"]:
                        blocks[-1][name] += event["delta"][name]
                inputs[-1] += event["delta"].get("partial_json", "")
            case "message_delta":
                done |= event["delta"]
                done["usage"] |= event["usage"]
    for block, text in zip(blocks, inputs, strict=True):
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
    return done, blocks, count


def _ollama(
    server: Served,
    path: str,
    body: dict[str, Any],
    asked: Asked,
    text_of: Callable[[dict[str, Any]], str],
) -> Answer:
    options: dict[str, Any] = {"temperature": 0, "num_predict": asked.limit}
    if asked.stop:
        options["stop"] = asked.stop
    body = {"model": "default", "options": options, **body}
    if body["stream"]:
        lines = list(events(server, path, body))
    else:
        lines = [whole(server, path, body)]
    last = lines[-1]
    assert [line["done"] for line in lines] == [*[False] * (len(lines) - 1), True]
    return Answer(
        "".join(map(text_of, lines)),
        end=last["done_reason"],
        usage=[last["prompt_eval_count"], last["eval_count"]],
        events=len(lines) if body["stream"] else 0,
    )


def ollama_chat(server: Served, asked: Asked, stream: bool) -> Answer:
    """POST /api/chat, Ollama's API."""
    body = {"messages": [{"role": "user", "content": asked.prompt}], "stream": stream}
    return _ollama(server, "/api/chat", body, asked, lambda line: line["message"]["content"])


def ollama_generate(server: Served, asked: Asked, stream: bool) -> Answer:
    """POST /api/generate, Ollama's API."""
    body = {"prompt": asked.prompt, "stream": stream}
    return _ollama(server, "/api/generate", body, asked, lambda line: line["response"])


def generate(server: Served, asked: Asked, stream: bool) -> Answer:
    """POST /generate, SGLang's API; a chunk has the whole text so far."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": asked.limit}
    if asked.stop:
        sampling["stop"] = asked.stop
    if asked.schema:
        sampling["json_schema"] = json.dumps(asked.schema)
    body = {
        "text": asked.prompt,
        "sampling_params": sampling,
        "return_logprob": True,
        "top_logprobs_num": TOP,
        "stream": stream,
    }
    chunks = list(events(server, "/generate", body)) if stream else []
    last = chunks[-1] if stream else whole(server, "/generate", body)
    for earlier, later in pairwise(chunks):
        assert later["text"].startswith(earlier["text"]), "a chunk takes text back"
    meta = last["meta_info"]
    return Answer(
        last["text"],
        end=meta["finish_reason"],
        usage=[meta["prompt_tokens"], meta["completion_tokens"], last["output_ids"]],
        logprobs=[meta["output_token_logprobs"], meta["output_top_logprobs"]],
        events=len(chunks),
    )


APIS: dict[str, Callable[[Served, Asked, bool], Answer]] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/messages": messages,
    "/api/chat": ollama_chat,
    "/api/generate": ollama_generate,
    "/generate": generate,
}
