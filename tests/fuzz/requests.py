"""Hypothesis strategies for requests, by the server's own OpenAPI description and by what is known
of the fields that matter: values in order, odd ones, and bodies that are broken as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from tests.fuzz.documents import JSON, broken

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
PATHS = (GENERATE, COMPLETIONS, CHAT)
JSON_TYPE = "application/json"
TYPES = ("text/plain", "", "application/json; charset=utf-16", "multipart/form-data", "x/y", "é")
TOKENS = 3  # of an answer, mostly


@dataclass(frozen=True)
class Sent:
    """One request as it goes out."""

    path: str
    body: bytes
    content_type: str = JSON_TYPE


Value = st.SearchStrategy[Any]
Schema = Mapping[str, Any]

INTEGERS = (-(2**63), -(2**31), -7, -1, 0, 1, 2, 128, 2**31 - 1, 2**31, 2**40, 2**63, 10**30)
ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(INTEGERS),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(("x" * 3000, "\ud800", "a\0b", "[", "{}", "0", "-1", "true")),
    st.lists(st.one_of(st.integers(), st.text(max_size=2), st.none()), max_size=3),
    st.lists(st.lists(st.integers(-2, 300), max_size=2), max_size=3),
    st.dictionaries(st.sampled_from(("0", "7", "-1", "x", "id", "type")), st.floats(), max_size=2),
)
PATTERNS = ("[a-c]+", "a+", ["[0-9]", "x*"], "(", "(a*)*b", "a{1000000}", "\\p{L}", "(?P<a>", "")
SCHEMAS = (
    '{"type": "object"}',
    '{"type": "integer", "minimum": 5, "maximum": 1}',
    '{"$ref": "#"}',
    '{"type": "x"}',
    '{"enum": []}',
    '{"type": "string", "pattern": "("}',
    "{",
    "[]",
    "true",
)
# What `sampling_params` may hold, each with values that are in order, or nearly.
SAMPLING: dict[str, list[Any]] = {
    "n": [1, 2, 3],
    "temperature": [0, 0.0, 0.7, 5, 1e-9, 1e30],
    "top_p": [0.5, 1.0, 1e-9],
    "top_k": [-1, 1, 40, 10**9],
    "min_p": [0.0, 0.3, 1],
    "frequency_penalty": [-2, 0.5],
    "presence_penalty": [0.0, 2],
    "repetition_penalty": [0.1, 1.3, 1e-9, 2],
    "min_new_tokens": [0, 2, 5],
    "max_new_tokens": [0, 1, 9],
    "stop": ["a", ["b", ""], ["x"] * 40, ""],
    "stop_token_ids": [[], [5], [10**9], [-1], [None]],
    "stop_regex": list(PATTERNS),
    "regex": list(PATTERNS),
    "json_schema": list(SCHEMAS),
    "ebnf": ['root ::= "a"', "root", 'root ::= root "a"', ""],
    "structural_tag": ["{}", "x", '{"structures": [], "triggers": []}'],
    "ignore_eos": [True],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": [False],
    "no_stop_trim": [True],
    "stream_interval": [1, 3],
    "logit_bias": [{"5": 1.5}, {"7": -100}, {"-1": 1.0}, {"x": 1.0}, {"5": 1e39}, {"1000000": 1}],
    "sampling_seed": [0, 2**62, -1],
    "beam_width": [1, 2, 100_000],
    "watermark": [True, {}, {"enabled": True}, {"key": "x"}],
    "custom_params": [
        {"dspark_speed": 5.0},
        {"dspark_speed": 0},
        {"dspark_speed": 1e400},
        {"other": [1, "a"]},
        {"__sglang_reasoning_end_token_ids": [10**9]},
        {"__sglang_reasoning_in_grammar": True},
        {"thinking_budget": -1},
        {"a": {"b": {"c": 1}}},
    ],
    "is_normalized": [True],
    "stop_strs": ["a"],
    "ebnf_full_assistant": [True],
}
# Fields of /generate beside it.
FIELDS: dict[str, list[Any]] = {
    "return_logprob": [True],
    "logprob_start_len": [-1, 0, 1, 50],
    "top_logprobs_num": [0, 3, 1000],
    "token_ids_logprob": [[], [4, 5], [-1], [10**6]],
    "stream": [True],
    "rid": ["one", ["a", "b"], [], "x" * 5000, ""],
    "priority": [1, -(10**6)],
    "return_text_in_logprobs": [True],
    "return_hidden_states": [True, "last"],
    "return_prompt_token_ids": [True],
    "return_flat_raw_top_logprobs": [True],
    "return_sampling_mask": [True],
    "return_entropy": [True],
    "extra_key": ["x", ["x"]],
    "cache_salt": ["x"],
    "session_id": ["s"],
    "session_params": [{"id": "none"}, {}, {"id": "x", "rid": "y", "offset": -5, "replace": True}],
    "input_embeds": [[[0.0]], [[[0.0]]], [[0.0] * 64]],
    "image_data": ["http://127.0.0.1:9/x.png", "x", ["/etc/passwd"]],
    "lora_path": ["adapter", ["a", None]],
    "custom_logit_processor": ["x", '{"callable": "8004"}'],
    "bootstrap_room": [1],
    "bootstrap_host": ["127.0.0.1"],
    "routed_dp_rank": [0, 1],
    "data_parallel_rank": [0],
    "http_worker_ipc": ["ipc:///nowhere", "tcp://127.0.0.1:9"],
    "kv_hints": [{}, {"version": 1}],
    "need_wait_for_mm_inputs": [True],
    "multi_item_delimiter_indices": [[0], [[0]]],
    "token_indices_to_pool": [[0], [[0]], [10**6]],
    "positional_embed_overrides": [[1], {"embeds": [], "positions": []}],
    "max_thinking_tokens": [5],
    "require_reasoning": [True],
    "log_metrics": [False],
    "received_time": [0.0, -1e300],
    "custom_labels": [{"a": "b"}],
    "external_trace_header": [{"traceparent": "x"}],
}
MESSAGES: list[Any] = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ""}],
    [{"role": "assistant", "content": "x"}],
    [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/x"}}]}],
    [{"role": "user", "content": []}],
    [{"role": "tool", "content": "x", "tool_call_id": "1"}],
    [{"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}]}],
    [{"role": "unknown", "content": "x"}],
    [{"role": "user"}],
    [],
]  # fmt: skip
# Fields of OpenAI's two interfaces whose values in order a schema does not tell.
OPENAI: dict[str, list[Any]] = {
    "logprobs": [True, 3, 0, 1000],
    "top_logprobs": [0, 3, 1000],
    "response_format": [
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#"}}},
        {"type": "structural_tag", "structures": [], "triggers": []},
    ],
    "tools": [
        [],
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        [{"type": "function", "function": {"name": "", "parameters": {"type": "x"}}}],
    ],
    "tool_choice": ["auto", "required", {"type": "function", "function": {"name": "f"}}],
    "stream_options": [{"include_usage": True}, {}],
    "chat_template_kwargs": [{"x": 1}, {"messages": []}, {"add_generation_prompt": False}],
    "continue_final_message": [True],
    "reasoning_effort": ["low", 0.5, "none"],
    "echo": [True],
    "best_of": [2],
    "suffix": ["x"],
    "seed": [0, -1, 2**63],
    "stop": SAMPLING["stop"],
    "logit_bias": SAMPLING["logit_bias"],
    "custom_params": SAMPLING["custom_params"],
    "regex": list(PATTERNS),
    "ebnf": SAMPLING["ebnf"],
    "session_params": FIELDS["session_params"],
    "model": ["default", "x", "a:b", "", ":"],
}
TEXT = st.text(max_size=8)
IDS = st.lists(st.integers(-2, 300), max_size=4)
PROMPTS = st.one_of(TEXT, st.lists(TEXT, max_size=3), IDS, st.lists(IDS, max_size=3))


def of_schema(schema: Schema, parts: Mapping[str, Schema], depth: int = 3) -> Value:
    """Values that a JSON schema of OpenAPI describes. parts: `components.schemas`."""
    if "$ref" in schema:
        return of_schema(parts[schema["$ref"].rsplit("/", 1)[-1]], parts, depth)
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return st.one_of(*(of_schema(each, parts, depth) for each in schema[several]))
    if "const" in schema or "enum" in schema:
        return st.sampled_from(schema.get("enum") or [schema.get("const")])
    kind = schema.get("type")
    if kind == "array" and depth > 0:
        return st.lists(of_schema(schema.get("items", {}), parts, depth - 1), max_size=3)
    if kind == "object" and depth > 0:
        return _object(schema, parts, depth)
    return _PLAIN.get(str(kind), ODD)


_PLAIN: dict[str, Value] = {
    "integer": st.one_of(st.integers(-3, 300), st.sampled_from(INTEGERS)),
    "number": st.one_of(st.floats(-2, 2), st.floats(), st.sampled_from(INTEGERS)),
    "boolean": st.booleans(),
    "string": st.one_of(TEXT, st.sampled_from(("default", "auto", "x" * 3000))),
    "null": st.none(),
    "array": st.just([]),
    "object": st.just({}),
}


def _object(schema: Schema, parts: Mapping[str, Schema], depth: int) -> Value:
    fields = schema.get("properties")
    if not fields:
        return st.dictionaries(st.text(max_size=3), ODD, max_size=2)
    wanted = set(schema.get("required", ()))
    made = {name: of_schema(each, parts, depth - 1) for name, each in fields.items()}
    optional = sorted(made.keys() - wanted)[:8]
    return st.fixed_dictionaries(
        {name: made[name] for name in sorted(wanted)},
        optional={name: made[name] for name in optional},
    )


def fields_of(api: Mapping[str, Any], path: str) -> dict[str, Value]:
    """Field -> values of the body of a path, by the server's OpenAPI description."""
    parts = api["components"]["schemas"]
    body = api["paths"][path]["post"]["requestBody"]["content"][JSON_TYPE]["schema"]
    while "$ref" in body:
        body = parts[body["$ref"].rsplit("/", 1)[-1]]
    return {name: of_schema(each, parts) for name, each in body["properties"].items()}


def some_of(known: Mapping[str, list[Any]], described: Mapping[str, Value]) -> Value:
    """A few fields: up to three in order, up to two by their description, one of them odd."""
    names = st.sampled_from(sorted({*known, *described}))
    usual = st.sampled_from(sorted(known)).flatmap(
        lambda name: st.tuples(st.just(name), st.sampled_from(known[name]))
    )
    by_type = (
        st.sampled_from(sorted(described)).flatmap(
            lambda name: st.tuples(st.just(name), described[name])
        )
        if described
        else usual
    )
    pairs = st.tuples(
        st.lists(usual, max_size=3),
        st.lists(by_type, max_size=2),
        st.lists(st.tuples(names, ODD), max_size=1),
    )
    return pairs.map(lambda each: dict([*each[0], *each[1], *each[2]]))


def _as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def bodies(api: Mapping[str, Any], path: str) -> st.SearchStrategy[Sent]:
    """Requests to one path: whole JSON, in order or odd."""
    described = fields_of(api, path)
    if path == GENERATE:
        prompts = st.one_of(
            PROMPTS.map(lambda each: {"text": each}), PROMPTS.map(lambda each: {"input_ids": each})
        )
        limit = st.just({"max_new_tokens": TOKENS})
        sampling = st.builds(lambda a, b: {"sampling_params": {**a, **b}}, limit,
                             some_of(SAMPLING, {}))  # fmt: skip
        left = {name: each for name, each in described.items() if name != "sampling_params"}
        made = st.builds(lambda a, b, c: {**a, **b, **c}, prompts, sampling, some_of(FIELDS, left))
    else:
        first: Value = PROMPTS if path == COMPLETIONS else st.sampled_from(MESSAGES)
        name = "prompt" if path == COMPLETIONS else "messages"
        limit = st.just({"model": "default", "max_tokens": TOKENS})
        known = {field: values for field, values in OPENAI.items() if field in described}
        made = st.builds(lambda a, b, c: {**a, name: b, **c}, limit, first,
                         some_of(known, described))  # fmt: skip
    return made.map(lambda body: Sent(path, _as_json(body)))


def raw(path: str) -> st.SearchStrategy[Sent]:
    """Requests to one path whose body is broken as text, or called something else."""
    valid: dict[str, Any] = {"model": "default", "max_tokens": TOKENS, "n": 1, "stop": ["a"]}
    if path == GENERATE:
        sampling = {"max_new_tokens": TOKENS, "temperature": 0.5, "stop": ["a"], "n": 1}
        valid = {"text": "Once", "sampling_params": sampling, "return_logprob": False}
    elif path == COMPLETIONS:
        valid["prompt"] = "Once"
    else:
        valid["messages"] = MESSAGES[0]
    types = st.one_of(st.just(JSON_TYPE), st.just(JSON_TYPE), st.sampled_from(TYPES))
    return st.builds(Sent, st.just(path), broken(valid, JSON), types)
