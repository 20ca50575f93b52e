"""SGLang's own features under DSPARK on the live server: drafts change none of them."""

from __future__ import annotations

import itertools
import json
import threading
import time
from typing import Any

import httpx
import pytest

from tests.integration.prompts import PROMPTS, chat_template
from tests.integration.serving import Served

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("demo-pair")]

PROMPT = chat_template("Write a Python function that adds two numbers.")
LOGPROB_TOLERANCE = 1e-3


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a server-sent stream, which must end with `[DONE]`."""
    data = [line[5:].strip() for line in response.iter_lines() if line.startswith("data:")]
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def stream(server: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    server.pool.use(server)
    with server.http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        return events(response)


def test_streamed_chunks_make_up_the_whole_text(dspark: Served) -> None:
    whole = dspark.generate(PROMPT, max_new_tokens=48)
    sampling = {"temperature": 0.0, "max_new_tokens": 48}
    chunks = stream(
        dspark, "/generate", {"text": PROMPT, "sampling_params": sampling, "stream": True}
    )
    assert len(chunks) > 1
    for before, after in itertools.pairwise(chunks):  # each holds the text so far
        assert after["text"].startswith(before["text"])
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["meta_info"]["completion_tokens"] == 48


def test_openai_stream_deltas_make_up_the_whole_text(dspark: Served) -> None:
    body = {"model": "default", "prompt": PROMPT, "max_tokens": 48, "temperature": 0.0}
    whole = dspark.request("POST", "/v1/completions", json=body).json()
    chunks = stream(dspark, "/v1/completions", {**body, "stream": True})
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == whole["choices"][0]["text"]
    assert len(chunks) > 2


def test_abort_ends_a_request_and_leaves_the_rest(dspark: Served) -> None:
    neighbour = dspark.generate(PROMPT, max_new_tokens=24)["output_ids"]
    aborted: dict[str, Any] = {}

    def long_request() -> None:
        sampling = {"temperature": 0.0, "max_new_tokens": 4000, "ignore_eos": True}
        body = {"text": "Count: 1, 2,", "rid": "to-abort", "sampling_params": sampling}
        response = dspark.http.post("/generate", json=body)
        aborted.update(status=response.status_code, body=response.json())

    dspark.pool.use(dspark)
    thread = threading.Thread(target=long_request)
    thread.start()
    time.sleep(2.0)
    assert thread.is_alive(), "the request ended before it could be aborted"
    assert dspark.request("POST", "/abort_request", json={"rid": "to-abort"}).status_code == 200
    thread.join(timeout=120.0)
    assert not thread.is_alive()
    assert "abort" in json.dumps(aborted["body"])
    assert dspark.generate(PROMPT, max_new_tokens=24)["output_ids"] == neighbour


def test_a_client_that_leaves_does_not_block_the_server(dspark: Served) -> None:
    sampling = {"temperature": 0.0, "max_new_tokens": 4000, "ignore_eos": True}
    body = {"text": "Count: 1, 2,", "sampling_params": sampling, "stream": True}
    dspark.pool.use(dspark)
    with dspark.http.stream("POST", "/generate", json=body) as response:
        next(response.iter_lines())
    deadline = time.monotonic() + 30.0
    while running_requests(dspark) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert running_requests(dspark) == 0
    assert dspark.healthy()


def running_requests(server: Served) -> int:
    """Requests in the scheduler now, from /metrics."""
    return int(metric(server, "sglang:num_running_reqs"))


def metric(server: Served, name: str) -> float:
    """Value of a gauge or counter, summed over its labels."""
    text = server.request("GET", "/metrics").text
    rows = [r for r in text.splitlines() if r.startswith((f"{name}{{", f"{name} "))]
    assert rows, f"no metric {name}"
    return sum(float(row.rsplit(" ", 1)[1]) for row in rows)


def test_stop_strings_end_where_plain_decoding_would(dspark: Served) -> None:
    free = dspark.generate(PROMPT, max_new_tokens=48)["text"]
    stop = free[len(free) // 2 :][:5]
    assert len(stop) == 5
    sampling = {"stop": [stop]}
    stopped = dspark.generate(PROMPT, max_new_tokens=48, sampling_params=sampling)
    assert stopped["text"] == free[: free.index(stop)]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_stop_token_in_the_middle_of_a_block(dspark: Served) -> None:
    free = dspark.generate(PROMPT, max_new_tokens=48)["output_ids"]
    token = next(t for t in free[20:] if t not in free[:20])
    sampling = {"stop_token_ids": [token]}
    stopped = dspark.generate(PROMPT, max_new_tokens=48, sampling_params=sampling)
    assert stopped["output_ids"] == free[: free.index(token) + 1]


def test_max_new_tokens_is_exact_for_any_acceptance(dspark: Served) -> None:
    free = dspark.generate(PROMPT, max_new_tokens=24)["output_ids"]
    for count in (1, 2, 3, 7, 8):
        answer = dspark.generate(PROMPT, max_new_tokens=count)
        assert answer["output_ids"] == free[:count]
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": count}


def test_logprobs_are_the_plain_servers(plain: Served, dspark: Served) -> None:
    fields = {"return_logprob": True, "top_logprobs_num": 2, "max_new_tokens": 32}
    got = dspark.generate(PROMPT, **fields)
    expected = plain.generate(PROMPT, **fields)
    assert got["output_ids"] == expected["output_ids"]
    ours = got["meta_info"]["output_token_logprobs"]
    theirs = expected["meta_info"]["output_token_logprobs"]
    assert len(ours) == len(theirs) == 32
    for (a, token_a, *_), (b, token_b, *_) in zip(ours, theirs, strict=True):
        assert token_a == token_b
        assert a == pytest.approx(b, abs=LOGPROB_TOLERANCE)
    tops = zip(
        got["meta_info"]["output_top_logprobs"],
        expected["meta_info"]["output_top_logprobs"],
        strict=True,
    )
    for row_a, row_b in tops:
        assert [x[0] for x in row_a] == pytest.approx([x[0] for x in row_b], abs=LOGPROB_TOLERANCE)


def test_top_k_1_is_greedy_at_any_temperature(dspark: Served) -> None:
    greedy = dspark.generate(PROMPT, max_new_tokens=32)
    sampling = {"temperature": 1.5, "top_k": 1, "top_p": 0.9}
    answer = dspark.generate(PROMPT, max_new_tokens=32, sampling_params=sampling)
    assert answer["output_ids"] == greedy["output_ids"]


def test_sampling_draws_different_texts_from_allowed_tokens(dspark: Served) -> None:
    """Every sampled token lies in the top k of its own step, as the returned logprobs tell."""
    k = 5
    sampling = {"temperature": 1.0, "top_k": k, "top_p": 0.95}
    answers = dspark.generate_all(
        [PROMPT] * 6,
        concurrency=6,
        max_new_tokens=24,
        sampling_params=sampling,
        return_logprob=True,
        top_logprobs_num=k,
    )
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 1
    for answer in answers:
        meta = answer["meta_info"]
        rows = zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True)
        for (logprob, token, *_), top in rows:
            assert token in {entry[1] for entry in top}
            assert logprob <= 0.0


def test_greedy_and_sampled_requests_share_a_batch(dspark: Served) -> None:
    alone = dspark.generate(PROMPT, max_new_tokens=24)["output_ids"]
    others = [threading.Thread(target=_sampled, args=(dspark, seed)) for seed in range(3)]
    for thread in others:
        thread.start()
    together = dspark.generate(PROMPT, max_new_tokens=24)["output_ids"]
    for thread in others:
        thread.join()
    assert together == alone


def _sampled(server: Served, seed: int) -> None:
    sampling = {"temperature": 1.0, "top_p": 0.9, "max_new_tokens": 40, "ignore_eos": True}
    body = {"text": PROMPTS[seed], "sampling_params": sampling}
    assert server.http.post("/generate", json=body).status_code == 200


def test_prefix_cache_is_reused_and_changes_nothing(dspark: Served) -> None:
    prompt = PROMPTS[-2]  # some 150 tokens
    dspark.flush_cache()
    sampling = {"ignore_eos": True}
    first = dspark.generate(prompt, max_new_tokens=24, sampling_params=sampling)
    second = dspark.generate(prompt, max_new_tokens=24, sampling_params=sampling)
    longer = dspark.generate(prompt + first["text"], max_new_tokens=8)
    assert first["meta_info"]["cached_tokens"] == 0
    assert second["meta_info"]["cached_tokens"] > 100
    assert second["output_ids"] == first["output_ids"]
    assert second["meta_info"].get("spec_verify_ct", 0) > 0
    assert longer["meta_info"]["cached_tokens"] > 100


def test_chat_completions(dspark: Served) -> None:
    turns = [{"role": "user", "content": "Write a Python function that adds two numbers."}]
    body = {"model": "default", "messages": turns, "max_tokens": 32, "temperature": 0.0}
    answer = dspark.request("POST", "/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"]
    assert answer["usage"]["completion_tokens"] <= 32


def test_metrics_count_tokens_and_verify_steps(dspark: Served) -> None:
    names = ("sglang:generation_tokens_total", "sglang:spec_verify_calls_total")
    before = [metric(dspark, name) for name in names]
    steps = dspark.generate(PROMPT, max_new_tokens=32)["meta_info"]["spec_verify_ct"]
    wanted = [before[0] + 32, before[1] + steps]
    deadline = time.monotonic() + 20.0
    while [metric(dspark, name) for name in names] != wanted:
        assert time.monotonic() < deadline, "the counters do not show the request"
        time.sleep(0.5)


@pytest.mark.parametrize(
    "sampling",
    [{"top_k": 10**9, "temperature": 1.0}, {"max_new_tokens": 0}, {"min_new_tokens": 3}],
)
def test_odd_but_valid_requests_are_served(dspark: Served, sampling: dict[str, Any]) -> None:
    answer = dspark.generate("Once upon", max_new_tokens=4, sampling_params=sampling)
    assert answer["meta_info"]["completion_tokens"] <= 4
    assert dspark.healthy()


def test_a_prompt_longer_than_the_context_is_refused(dspark: Served) -> None:
    answer = dspark.request("POST", "/generate", json={"input_ids": [5] * 9000})
    assert 400 <= answer.status_code < 500
    assert dspark.healthy()
