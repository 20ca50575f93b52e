"""Redrafting a recorded answer gives the engine's own steps, whatever the drafter."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_dspark.baselines.dflash import save_dflash
from sglang_dspark.baselines.eagle3 import save_eagle3
from sglang_dspark.baselines.mtp import save_mtp
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.engine import DecodeSettings
from sglang_dspark.evaluation.prompts import EvalPrompt
from sglang_dspark.evaluation.recording import Workload, record
from sglang_dspark.evaluation.redraft import Subject, redraft
from sglang_dspark.evaluation.traces import Trace
from sglang_dspark.training.provenance import target_sha256
from tests.baselines.helpers import random_drafter
from tests.evaluation.conftest import EOS, VOCAB, Pair

SAVE = {"dflash": save_dflash, "eagle3": save_eagle3, "mtp": save_mtp}


@pytest.fixture(scope="module")
def workload(pair: Pair, prompts: list[list[int]]) -> Workload:
    stops = frozenset({EOS, 40, 41, 42, 43, 44, 45})  # so that some answers stop early
    return Workload(
        target=pair.target_dir,
        target_sha256=target_sha256(pair.target_dir),
        prompts=tuple(EvalPrompt(str(i), "x", (str(i),)) for i in range(len(prompts))),
        ids=tuple(map(tuple, prompts)),
        settings=DecodeSettings(max_new_tokens=23, stop_ids=stops, batch=3),
    )


@pytest.fixture(scope="module")
def answers(workload: Workload, pair: Pair) -> Trace:
    return record(workload, pair.drafter_dir)


def test_dspark_steps_are_the_engines(workload: Workload, pair: Pair, answers: Trace) -> None:
    (again,) = redraft(workload, [Subject(pair.drafter_dir)], answers)
    assert {each.finish for each in answers.generations} == {"stop", "length"}
    for ours, engines in zip(again.generations, answers.generations, strict=True):
        assert ours.tokens == engines.tokens
        for one, other in zip(ours.steps, engines.steps, strict=True):
            assert replace(one, confidence=()) == replace(other, confidence=())
            assert one.confidence == pytest.approx(other.confidence, abs=1e-5)
    assert sum(step.accepted for each in again.generations for step in each.steps) > 20


def test_steps_of_every_kind_are_the_engines(
    workload: Workload, answers: Trace, tmp_path: Path
) -> None:
    for kind, save in SAVE.items():
        drafter = random_drafter(kind, VOCAB, num_target_layers=2)
        save(drafter, tmp_path / kind)  # type: ignore[operator]
    gammas = {"dflash": None, "eagle3": 2, "mtp": 1}
    found = redraft(workload, [Subject(tmp_path / k, gammas[k]) for k in SAVE], answers)
    for kind, again in zip(SAVE, found, strict=True):
        settings = replace(workload.settings, gamma=gammas[kind])
        expected = record(replace(workload, settings=settings), tmp_path / kind)
        assert again.generations == expected.generations
        assert again.drafter == expected.drafter


def test_without_its_transition_a_drafter_is_its_backbone(
    workload: Workload, pair: Pair, answers: Trace
) -> None:
    """The tiny drafter's transition is its target's; a random backbone alone drafts less."""
    (bare,) = redraft(workload, [Subject(pair.drafter_dir, transition=False)], answers)
    accepted = sum(step.accepted for each in bare.generations for step in each.steps)
    full = sum(step.accepted for each in answers.generations for step in each.steps)
    assert accepted < 0.8 * full
    assert bare.drafter.head == "none"
    assert [each.tokens for each in bare.generations] == [e.tokens for e in answers.generations]


def test_other_answers_are_refused(workload: Workload, pair: Pair, answers: Trace) -> None:
    sampled = replace(answers, settings={**answers.settings, "temperature": 1.0})
    longer = replace(workload, settings=replace(workload.settings, max_new_tokens=9))
    fewer = replace(workload, ids=workload.ids[:-1], prompts=workload.prompts[:-1])
    cases = [
        (workload, sampled, "only greedy answers"),
        (longer, answers, "up to 23 tokens, asked for were 9"),
        (fewer, answers, "to other prompts"),
        (workload, replace(answers, target_sha256="0" * 64), "of another target"),
    ]
    for work, told, complaint in cases:
        with pytest.raises(DSparkError, match=complaint):
            redraft(work, [Subject(pair.drafter_dir)], told)


def test_drafters_that_read_other_layers_are_refused(
    workload: Workload, pair: Pair, answers: Trace, tmp_path: Path
) -> None:
    raw = json.loads((pair.drafter_dir / "config.json").read_text())
    raw["dflash_config"]["target_layer_ids"] = [0]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(DSparkError, match="read different target layers"):
        redraft(workload, [Subject(pair.drafter_dir), Subject(tmp_path)], answers)
