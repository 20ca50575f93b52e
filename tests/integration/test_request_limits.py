"""Requests that would end the server, starve everyone or raise: each is refused by name, in a 400.

Those of the first table ended a live server, or got an error of its own (500), before they were
refused. The generated ones are of every field that a client may send, one or more of them odd.
"""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.serving import Served

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("demo-pair")]

JSON = {"headers": {"content-type": "application/json"}}


def with_sampling(**sampling: Any) -> dict[str, Any]:
    return {"json": {"text": "x", "sampling_params": {"max_new_tokens": 4, **sampling}}}


def with_field(**field: Any) -> dict[str, Any]:
    sampling = {"max_new_tokens": 4}
    return {"json": {"text": "x", "return_logprob": True, "sampling_params": sampling, **field}}


MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "no JSON": ({"content": b'{"text": "x", ', **JSON}, ""),
    "no UTF-8": ({"content": b'{"text": "\xff\xfe"}', **JSON}, ""),
    "nested deeply": ({"content": b'{"text": ' + b"[" * 10**5 + b"]" * 10**5 + b"}", **JSON}, ""),
    "a list": ({"json": [1, 2, 3]}, ""),
    "no input": ({"json": {"sampling_params": {"max_new_tokens": 4}}}, "input_ids"),
    "text of a wrong type": ({"json": {"text": 17}}, "text"),
    "an empty text": ({"json": {"text": ""}}, "prompt has no token"),
    "one empty text of two": ({"json": {"text": ["x", ""]}}, "prompt has no token"),
    "no tokens": ({"json": {"input_ids": []}}, ""),
    "ids of a wrong type": ({"json": {"input_ids": ["a", "b"]}}, "input_ids"),
    "ids outside the vocabulary": ({"json": {"input_ids": [1, 10**6]}}, "token 1000000"),
    "negative ids": ({"json": {"input_ids": [1, -5]}}, "token -5"),
    "sampling_params of a wrong type": ({"json": {"text": "x", "sampling_params": "greedy"}}, ""),
    "negative max_new_tokens": (with_sampling(max_new_tokens=-4), "max_new_tokens"),
    "max_new_tokens of a wrong type": (with_sampling(max_new_tokens="many"), "many"),
    "negative temperature": (with_sampling(temperature=-1.0), "temperature"),
    "top_p of 0": (with_sampling(top_p=0.0), "top_p"),
    "top_k of -7": (with_sampling(top_k=-7), "top_k"),
    "a bias beyond float32": (with_sampling(logit_bias={"5": 1e39}), "logit_bias"),
    "a temperature beyond float32": (with_sampling(temperature=1e39), "temperature"),
    "top_k beyond 32 bits": (with_sampling(top_k=2**40, temperature=1.0), "top_k"),
    "stop of a wrong type": (with_sampling(stop=[1]), "expected a string"),
    "a flag that is none": (with_sampling(ignore_eos="yes"), "yes"),
    "a pattern that is none": (with_sampling(stop_regex="("), "stop_regex '('"),
    "a field of upstream's own": (with_sampling(is_normalized=True), "is_normalized"),
    "unknown sampling field": (with_sampling(tempreature=1.0), "tempreature"),
    "masked tokens outside the vocabulary": (
        with_sampling(min_new_tokens=2, stop_token_ids=[10**6]),
        "stop_token_ids contain 1000000",
    ),
    "a speed that is none": (with_sampling(custom_params={"dspark_speed": "fast"}), "tokens/s"),
    "more answers than are served": (with_sampling(n=100_000), "1 to 128 answers"),
    "fewer answers than one": (with_sampling(n=-1), "n is -1"),
    "answers of a wrong type": (with_sampling(n="2"), "expected"),
    "more names than prompts": (with_field(rid=["a", "b"]), "rid is a list"),
    "more log-probabilities than are served": (with_field(top_logprobs_num=10**6), "0 to 1000"),
    "fewer log-probabilities than none": (with_field(top_logprobs_num=-3), "top_logprobs_num"),
    "no sampling_params for the prompt": (
        {"json": {"text": "x", "sampling_params": []}},
        "sampling_params: [] does not fit this request",
    ),
    "media for none of the prompts": (
        {"json": {"text": ["x"], "audio_data": []}},
        "audio_data: [] does not fit this request",
    ),
    "a grammar that allows nothing, sampled": (
        with_sampling(ebnf='root ::= root "a"', temperature=1.0),
        "allows no token; fix",
    ),
    "a grammar that allows nothing, greedy": (
        with_sampling(ebnf='root ::= root "a"', temperature=0.0),
        "allows no token; fix",
    ),
    "a grammar that ends nowhere, sampled": (
        with_sampling(ebnf='root ::= "a" x\nx ::= x "b"', temperature=1.0),
        "allows no token; fix",
    ),
    "a grammar that ends before min_new_tokens, sampled": (
        with_sampling(ebnf='root ::= "a"', min_new_tokens=3, temperature=1.0),
        "at its end before min_new_tokens",
    ),
    "a grammar that ends before min_new_tokens, greedy": (
        with_sampling(ebnf='root ::= "a"', min_new_tokens=3, temperature=0.0),
        "at its end before min_new_tokens",
    ),
    "top_p that is 0 in float32": (with_sampling(top_p=1e-60), "top_p"),
    "a factor that makes logits infinite": (with_sampling(repetition_penalty=1e-60), "repetition"),
    "a bias that a temperature makes infinite": (
        with_sampling(logit_bias={"5": 3e38}, temperature=0.1),
        "logit_bias",
    ),
    "a session of unknown fields": (with_field(session_params={"7": 1.0}), "session_params"),
    "hidden states": (with_field(return_hidden_states=True), "return_hidden_states"),
    "log-probabilities from before the prompt": (with_field(logprob_start_len=-7), "-7"),
}
OPENAI: dict[str, tuple[str, dict[str, Any], str]] = {
    "completions, no text": ("/v1/completions", {"prompt": ""}, "cannot be empty"),
    "completions, answers": ("/v1/completions", {"prompt": "x", "n": 100_000}, "answers"),
    "completions, top_k": ("/v1/completions", {"prompt": "x", "top_k": 2**40}, "top_k"),
    "completions, streamed": (
        "/v1/completions",
        {"prompt": "x", "top_k": 2**40, "stream": True},
        "top_k",
    ),
    "chat, answers": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "n": 100_000},
        "answers",
    ),
    "chat, a schema of nothing but itself": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"$ref": "#"}},
            },
        },
        "allows no token; fix",
    ),
    "chat, a format of another type": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "response_format": "json"},
        "response_format: 'json' does not fit this request",
    ),
    "chat, messages for the template": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            "chat_template_kwargs": {"messages": []},
        },
        "chat_template_kwargs: {'messages': []} does not fit this request",
    ),
    "completions, hidden states": (
        "/v1/completions",
        {"prompt": "x", "return_hidden_states": True},
        "return_hidden_states",
    ),
    "chat, log-probabilities": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            "logprobs": True,
            "top_logprobs": 10**6,
        },
        "top_logprobs",
    ),
}


def serves_on(server: Served) -> None:
    assert server.process.alive()
    assert server.generate("Once upon", max_new_tokens=4)["meta_info"]["completion_tokens"] == 4


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_is_refused_and_the_server_serves_on(dspark: Served, name: str) -> None:
    request, says = MALFORMED[name]
    answer = dspark.request("POST", "/generate", **request)
    assert 400 <= answer.status_code < 500, f"{answer.status_code}: {answer.text[:300]}"
    assert says in answer.text
    serves_on(dspark)


@pytest.mark.parametrize("name", OPENAI)
def test_the_same_by_openais_interface(dspark: Served, name: str) -> None:
    path, body, says = OPENAI[name]
    answer = dspark.request("POST", path, json={"model": "default", "max_tokens": 4, **body})
    streamed = body.get("stream", False)
    assert streamed or 400 <= answer.status_code < 500, f"{answer.status_code}: {answer.text[:300]}"
    assert says in answer.text
    serves_on(dspark)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([-(2**63), -(2**31), -2, -1, 0, 1, 2, 2**31 - 1, 2**31, 2**40, 2**63, 10**30]),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(), st.text(max_size=2), st.none()), max_size=3),
    st.dictionaries(st.sampled_from(["0", "7", "-1", "x"]), st.floats(), max_size=2),
)
# What a client may send, each with values that are in order.
SAMPLING: dict[str, list[Any]] = {
    "n": [1, 2],
    "temperature": [0, 0.0, 0.7, 5],
    "top_p": [0.5, 1.0],
    "top_k": [-1, 1, 40, 10**9],
    "min_p": [0.0, 0.3, 1],
    "frequency_penalty": [-2, 0.5],
    "presence_penalty": [0.0, 2],
    "repetition_penalty": [0.1, 1.3],
    "min_new_tokens": [0, 2],
    "stop": ["a", ["b", ""]],
    "stop_token_ids": [[], [5], [10**9]],
    "stop_regex": ["a+", ["[0-9]", "x*"]],
    "regex": ["[a-c]+", "("],
    "json_schema": ['{"type": "object"}', "{"],
    "ebnf": ['root ::= "a"', "root"],
    "structural_tag": ["{}", "x"],
    "ignore_eos": [True],
    "skip_special_tokens": [False],
    "spaces_between_special_tokens": [False],
    "no_stop_trim": [True],
    "stream_interval": [1, 3],
    "logit_bias": [{"5": 1.5}, {"7": -100}],
    "sampling_seed": [0, 2**62],
    "custom_params": [{"dspark_speed": 5.0}, {"other": [1, "a"]}],
    "is_normalized": [True],
    "stop_strs": ["a"],
}
FIELDS: dict[str, list[Any]] = {
    "return_logprob": [True],
    "logprob_start_len": [-1, 0, 1, 50],
    "top_logprobs_num": [0, 3, 1000],
    "token_ids_logprob": [[], [4, 5]],
    "stream": [True],
    "rid": ["one", ["a", "b"], []],
    "priority": [1],
    "return_text_in_logprobs": [True],
    "return_hidden_states": [True],
    "extra_key": ["x"],
    "session_params": [{"id": "none"}, {}],
    "input_embeds": [[[0.0]]],
}
PROMPT = st.one_of(
    st.fixed_dictionaries({"text": st.text(max_size=8)}),
    st.fixed_dictionaries({"text": st.lists(st.text(max_size=3), max_size=3)}),
    st.fixed_dictionaries({"input_ids": st.lists(st.integers(-2, 60_000), max_size=4)}),
)


def some_of(known: dict[str, list[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Up to four fields, at most one of them odd."""
    usual = st.sampled_from(sorted(known)).flatmap(
        lambda name: st.tuples(st.just(name), st.sampled_from(known[name]))
    )
    odd = st.tuples(st.sampled_from(sorted(known)), ODD)
    return st.tuples(st.lists(usual, max_size=3), st.lists(odd, max_size=1)).map(
        lambda pairs: dict(pairs[0] + pairs[1])
    )


@given(prompt=PROMPT, sampling=some_of(SAMPLING), fields=some_of(FIELDS))
@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_no_request_ends_the_server(
    dspark: Served, prompt: dict[str, Any], sampling: dict[str, Any], fields: dict[str, Any]
) -> None:
    body = {**prompt, **fields, "sampling_params": {**sampling, "max_new_tokens": 3}}
    headers = {**JSON["headers"], "connection": "close"}  # the server drops one that is idle
    answer = dspark.request("POST", "/generate", content=json.dumps(body), headers=headers)
    assert answer.status_code < 500, answer.text[:300]
    assert dspark.process.alive()


def test_a_refused_stream_leaves_no_error_behind(dspark: Served) -> None:
    """Upstream looks after a stream for two seconds, to end what its client has left."""
    before = dspark.process.log_path.read_text().count("Traceback")
    for body in ({"text": "x", "sampling_params": {"n": 500}}, {"text": "x", "rid": ["a", "b"]}):
        answer = dspark.request("POST", "/generate", json={**body, "stream": True})
        assert "error" in answer.text
    time.sleep(3)
    assert dspark.process.log_path.read_text().count("Traceback") == before
    serves_on(dspark)
