"""Traces: come back as written, are refused when they are none, and are compared only if alike."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.calibration_data import held_out, observations, split_halves
from sglang_dspark.evaluation.engine import DecodeSettings
from sglang_dspark.evaluation.prompts import EvalPrompt
from sglang_dspark.evaluation.recording import Workload, record
from sglang_dspark.evaluation.traces import (
    TracedPrompt,
    prompt_digest,
    read_trace,
    require_comparable,
    write_trace,
)
from tests.evaluation.conftest import GAMMA, Pair
from tests.evaluation.trace_world import drawn, generation, step, trace


def test_comes_back_as_written(tmp_path: Path) -> None:
    made = drawn(prompts=3, steps=4)
    write_trace(tmp_path / "deep" / "trace.json", made)
    assert read_trace(tmp_path / "deep" / "trace.json") == made


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": "other"}'])
def test_what_is_no_trace_is_one_line(content: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(DSparkError, match="is no trace") as caught:
        read_trace(tmp_path / "t.json")
    assert "\n" not in str(caught.value)
    with pytest.raises(DSparkError, match="cannot read"):
        read_trace(tmp_path / "none.json")


def test_a_damaged_step_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    write_trace(path, drawn(prompts=1, steps=2))
    raw = json.loads(path.read_text())
    raw["generations"][0]["steps"][0][3] = 9  # more accepted than verified
    path.write_text(json.dumps(raw))
    with pytest.raises(DSparkError, match="is no trace"):
        read_trace(path)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("settings",), 2),
        (("settings", "temperature"), "hot"),
        (("settings", "temperature"), None),
        (("settings", "top_k"), [5]),
        (("drafter", "gamma"), None),
        (("drafter", "gamma"), 3),
        (("drafter", "name"), 5),
        (("prompts", 0, "digest"), 2),
        (("target_sha256",), []),
        (("generations", 0, "finish"), "never"),
        (("generations", 0, "tokens", 0), "a"),
        (("generations", 0, "steps", 0, 0), "a"),
        (("generations", 0, "steps", 0, 1), [1]),
        (("generations", 0, "steps", 0, 5), []),
    ],
)
def test_a_field_of_another_kind_is_refused(
    where: tuple[str | int, ...], value: object, tmp_path: Path
) -> None:
    path = tmp_path / "t.json"
    write_trace(path, drawn(prompts=2, steps=2))
    raw = place = json.loads(path.read_text())
    for each in where[:-1]:
        place = place[each]
    place[where[-1]] = value
    path.write_text(json.dumps(raw))
    with pytest.raises(DSparkError, match="is no trace") as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_only_like_is_compared_with_like() -> None:
    one = drawn(prompts=4)
    require_comparable([one, drawn(prompts=4, name="other", layers=5)], ["a", "b"])
    for other, complaint in [
        (drawn(prompts=3), "other prompts"),
        (drawn(prompts=4, temperature=1.0), "other sampling"),
        (replace(one, target_sha256="ff"), "another target"),
    ]:
        with pytest.raises(DSparkError, match=f"b was recorded with {complaint}"):
            require_comparable([one, other], ["a", "b"])


def test_confidence_of_one_everywhere_is_no_confidence() -> None:
    headless = trace([generation(step(1, (1.0, 1.0)))], ["math"], 2)
    assert not headless.has_confidence()
    assert drawn(prompts=1).has_confidence()


def test_labels_are_what_the_engine_decided() -> None:
    """Shortened windows keep their length; the request of a step is its place in the list."""
    made = [
        generation(step(1, (0.9, 0.5), 1)),
        generation(step(0, (0.8, 0.25)), step(2, (0.5, 0.5))),
    ]
    data = observations(made, 2)
    assert data.accepted.tolist() == [1, 0, 2]
    assert data.verified.tolist() == [1, 2, 2]
    assert data.request.tolist() == [0, 1, 1]
    assert data.logits[2].tolist() == pytest.approx([0.0, 0.0], abs=1e-12)
    assert data.logits[0, 1] == 0.0
    assert data.logits[1, 1] == pytest.approx(-1.0986123)
    assert observations([], 3).logits.shape == (0, 3)


def test_halves_are_split_by_prompt_and_domain() -> None:
    prompts = [
        TracedPrompt(f"p{i}", "math" if i < 10 else "chat", prompt_digest([i % 18]))
        for i in range(20)
    ]
    fit, held = split_halves(prompts)
    assert sorted(fit + held) == list(range(20))
    assert abs(sum(i < 10 for i in fit) - 5) <= 1
    turned = [prompts[i] for i in reversed(range(20))]
    digests = {prompts[i].digest for i in fit if prompts[i].domain == "math"}
    again = {turned[i].digest for i in split_halves(turned)[0] if turned[i].domain == "math"}
    assert digests == again, "the halves do not depend on the order"
    used = [prompts[i].digest for i in fit]
    assert not {prompts[i].digest for i in held_out(prompts, used)} & set(used)


def test_engine_records_a_trace(pair: Pair, prompts: list[list[int]]) -> None:
    """Sampled decoding: acceptance in the trace is the accept rule's, confidence the head's."""
    chosen = tuple(tuple(prompt) for prompt in prompts[:4])
    work = Workload(
        target=pair.target_dir,
        target_sha256="00",
        prompts=tuple(EvalPrompt(f"p{i}", "math", ("x",)) for i in range(4)),
        ids=chosen,
        settings=DecodeSettings(max_new_tokens=12, temperature=1.0, batch=4),
    )
    calls: list[int] = []
    made = record(work, pair.drafter_dir, lambda: calls.append(1))
    assert len(calls) == 4
    facts = made.drafter
    assert (facts.kind, facts.head, facts.layers, facts.gamma) == ("dspark", "vanilla", 2, GAMMA)
    assert made.settings["temperature"] == 1.0
    assert made.settings["top_k"] is None
    assert made.has_confidence()
    assert [p.digest for p in made.prompts] == [prompt_digest(ids) for ids in chosen]
    data = observations(made.generations, GAMMA)
    emitted = sum(len(each.tokens) - 1 for each in made.generations)
    assert int(data.accepted.sum()) + len(data.accepted) >= emitted
