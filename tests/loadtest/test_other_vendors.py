"""Servers of other vendors: their dialects of OpenAI's streams, and a sweep of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.bodies import Sampling, request_body
from sglang_dspark.loadtest.client.metrics import Chunk
from sglang_dspark.loadtest.client.stream import Answer, AnswerReader
from sglang_dspark.loadtest.servers.ask import Served, ask_server
from sglang_dspark.loadtest.sweep import run_dir
from sglang_dspark.loadtest.sweep.config import SweepConfig
from sglang_dspark.loadtest.sweep.served import Address, sweep_of
from tests.loadtest.test_served_sweep import DSPARK, answering, swept
from tests.loadtest.vendor_server import MODEL, Usage, stream, vendor


def read(usage: Usage, tokens: int) -> tuple[Answer, tuple[str, str]]:
    """Return an answer whose events come one a second, and what became of it."""
    answer = Answer()
    reader = AnswerReader("chat", answer)
    ended = [reader.feed(piece, float(at)) for at, piece in enumerate(stream(tokens, usage))]
    assert ended == [*[False] * (len(ended) - 1), True]
    return answer, answer.close()


@pytest.mark.parametrize("usage", ["last", "every", "zeros"])
def test_tokens_and_times_of_a_dialect(usage: Usage) -> None:
    answer, ended = read(usage, 6)
    assert ended == ("ok", "")
    assert [chunk.tokens for chunk in answer.chunks] == [1] * 6
    # The first chunk of text is reasoning, behind one without choices and one with the role alone.
    assert [chunk.at for chunk in answer.chunks] == [2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert "".join(chunk.text for chunk in answer.chunks) == " 1 2 3 4 5 6"
    assert (answer.tokens, answer.prompt_tokens, answer.finish_reason) == (6, 7, "length")


def test_a_dialect_without_usage_is_not_measured() -> None:
    _, (outcome, reason) = read("none", 6)
    assert outcome == "malformed"
    assert "sends neither `usage`" in reason


def test_the_last_usage_counts() -> None:
    """A running usage may be late, or an estimate."""
    answer = Answer()
    for text, count in (("a", 1), ("bb", 2)):
        delta = {"choices": [{"delta": {"content": text}}], "usage": {"completion_tokens": count}}
        answer.openai(delta, 0.0)
    answer.openai({"choices": [{"delta": {}, "finish_reason": "stop"}]}, 1.0)
    answer.openai({"choices": [], "usage": {"completion_tokens": 5}}, 1.0)
    answer.openai({"choices": [], "usage": {"completion_tokens": 8}}, 1.0)
    assert answer.close() == ("ok", "")
    assert answer.tokens == sum(chunk.tokens for chunk in answer.chunks) == 8
    assert answer.chunks == [Chunk(0.0, "a", 3), Chunk(0.0, "bb", 5)]


def test_a_running_usage_of_zero_is_none() -> None:
    answer = Answer()
    for at, text in enumerate("ab"):
        choice = {"delta": {"content": text}, "finish_reason": "stop" if at else None}
        answer.openai({"choices": [choice], "usage": {"completion_tokens": 6 * at}}, float(at))
    assert answer.close() == ("ok", "")
    assert [chunk.tokens for chunk in answer.chunks] == [3, 3]


def test_other_vendors_get_the_fields_of_openai_alone() -> None:
    body = request_body("chat", [{"role": "user", "content": "x"}], Sampling(4), MODEL)
    assert body == {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 4,
        "temperature": 0.0,
    }
    assert "return_token_ids" not in request_body("completions", "x", Sampling(4), MODEL)


def test_such_a_server_is_asked_for_its_model() -> None:
    with vendor("last") as url:
        other = ask_server(url)
    assert other == Served(url, MODEL, MODEL, "", 0, "", False, other=True)
    config, arms = sweep_of([Address("", url), Address("", DSPARK.url)], [other, DSPARK])
    assert [arm.name for arm in arms] == ["other", "dspark"]
    assert (config.models, config.baseline, config.api) == ({"other": MODEL}, "other", "chat")
    with (
        answering(200, b'{"data": []}', "/v1/models") as url,
        pytest.raises(DSparkError, match="/v1/models names no model"),
    ):
        ask_server(url)


def test_models_are_of_arms_by_url() -> None:
    with pytest.raises(ValueError, match="models names a, which urls lacks"):
        SweepConfig(arms=["a"], baseline="a", concurrency=[1], models={"a": "m"})


def test_another_vendors_server_is_swept(tmp_path: Path) -> None:
    with vendor("every") as url:
        done = swept(tmp_path, f"theirs={url}")
    assert done.returncode == 0, done.stderr
    cells = run_dir.read_cells(tmp_path / "run")
    assert sorted(cell.name for cell in cells) == ["theirs-closed-1-0", "theirs-closed-2-0"]
    assert all((cell.ok, cell.failures) == (cell.requests, {}) for cell in cells)
    assert all(cell.tokens > cell.ok for cell in cells)
