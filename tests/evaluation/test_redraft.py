"""Test that redrafting a recorded answer gives the engine's own steps, for every drafter.

Of a sampled answer the steps have the engine's distribution.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sglang_dspark.drafter.draft_probs import over_vocabulary
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.engine import DecodeSettings
from sglang_dspark.evaluation.prompts import EvalPrompt
from sglang_dspark.evaluation.recording import Workload, record
from sglang_dspark.evaluation.redraft import Subject, redraft
from sglang_dspark.evaluation.traces import Trace
from sglang_dspark.families.dflash.checkpoint import save_dflash
from sglang_dspark.families.eagle3.checkpoint import save_eagle3
from sglang_dspark.families.mtp.checkpoint import save_mtp
from sglang_dspark.families.registry import open_drafter, proposer_of
from sglang_dspark.models.identity import target_sha256
from tests.evaluation.conftest import EOS, GAMMA, VOCAB, Pair
from tests.families.helpers import random_drafter

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


def test_some_of_the_answers(workload: Workload, pair: Pair, answers: Trace) -> None:
    """A trace of more prompts, in another order, serves as well."""
    picked = [2, 0]
    few = replace(
        workload,
        ids=tuple(workload.ids[i] for i in picked),
        prompts=tuple(workload.prompts[i] for i in picked),
    )
    (again,) = redraft(few, [Subject(pair.drafter_dir)], answers)
    assert again.prompts == answers.of_prompts(picked).prompts
    for ours, engines in zip(
        again.generations, [answers.generations[i] for i in picked], strict=True
    ):
        assert [replace(s, confidence=()) for s in ours.steps] == [
            replace(s, confidence=()) for s in engines.steps
        ]


def test_other_answers_are_refused(workload: Workload, pair: Pair, answers: Trace) -> None:
    sampled = replace(answers, settings={**answers.settings, "temperature": 1.0})
    hot = replace(workload.settings, temperature=1.0)
    cut = replace(sampled, settings={**sampled.settings, "top_p": 0.9})
    longer = replace(workload, settings=replace(workload.settings, max_new_tokens=9))
    more = replace(
        workload,
        ids=(*workload.ids, workload.ids[0]),
        prompts=(*workload.prompts, workload.prompts[0]),
    )
    cases = [
        (workload, sampled, "given at temperature 1, asked for was 0"),
        (replace(workload, settings=hot), cut, "cut by top_p"),
        (replace(workload, settings=replace(hot, top_k=5)), sampled, "cut by top_k"),
        (longer, answers, "up to 23 tokens, asked for were 9"),
        (more, answers, "to other prompts"),
        (workload, replace(answers, target_sha256="0" * 64), "of another target"),
    ]
    for work, recorded, complaint in cases:
        with pytest.raises(DSparkError, match=complaint):
            redraft(work, [Subject(pair.drafter_dir)], recorded)


def test_drafters_that_read_other_layers_are_refused(
    workload: Workload, pair: Pair, answers: Trace, tmp_path: Path
) -> None:
    raw = json.loads((pair.drafter_dir / "config.json").read_text())
    raw["dflash_config"]["target_layer_ids"] = [0]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(DSparkError, match="read different target layers"):
        redraft(workload, [Subject(pair.drafter_dir), Subject(tmp_path)], answers)


@pytest.fixture(scope="module")
def kinds(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A drafter of every kind, the baselines with a reduced vocabulary."""
    root, ids = tmp_path_factory.mktemp("kinds"), torch.arange(0, VOCAB, 3)
    for kind, save in SAVE.items():
        save(random_drafter(kind, VOCAB, ids, num_target_layers=2), root / kind)  # type: ignore[operator]
    return {"dspark": pair.drafter_dir} | {kind: root / kind for kind in SAVE}


def test_an_open_block_has_the_distributions_of_a_whole_one(
    pair: Pair, kinds: dict[str, Path]
) -> None:
    """Given the tokens that a whole block drew, it returns the distributions of those draws."""
    rng, temperature = torch.Generator().manual_seed(3), torch.tensor([0.7, 0.7])
    tokens = torch.randint(0, VOCAB, (2, 9), generator=rng)
    out = pair.target.forward(tokens, torch.zeros(2, dtype=torch.long), pair.target.new_cache(2, 9))
    rows, lens = torch.arange(2), torch.tensor([8, 8])
    for path in kinds.values():
        state = proposer_of(open_drafter(path, pair.target)).start(2, 16)
        state.prefill(rows, tokens[:, :8], out.features[:, :8], out.hidden[:, :8])
        whole = state.propose(None, tokens[:, 8], lens, temperature, rng)
        block = state.open(rows, tokens[:, 8], lens)
        seen = torch.cat([tokens[:, 8:], whole.tokens], 1)
        assert whole.probs is not None
        for k in range(GAMMA):
            distribution = torch.softmax(block.logits(seen[:, k]) / 0.7, -1)
            wanted = whole.probs[:, k]
            torch.testing.assert_close(
                over_vocabulary(distribution, block.draft_ids, VOCAB), wanted
            )
        torch.testing.assert_close(block.confidence(), whole.confidence)


def test_sampled_steps_have_the_engines_distribution(
    workload: Workload, pair: Pair, kinds: dict[str, Path]
) -> None:
    """Compare steps by accepted drafts with an engine run, for every kind of drafter.

    The same test must reject the steps of another drafter.
    """
    many = replace(
        workload,
        prompts=workload.prompts * 8,
        ids=workload.ids * 8,
        settings=replace(workload.settings, temperature=0.8, batch=64, seed=5),
    )
    answers = record(replace(many, settings=replace(many.settings, seed=6)), pair.drafter_dir)
    found = redraft(many, [Subject(path) for path in kinds.values()], answers)
    engines = [record(many, path) for path in kinds.values()]
    for ours, theirs in zip(found, engines, strict=True):
        assert _chance_equal(ours, theirs) > 1e-3, ours.drafter
    (bare,) = redraft(many, [Subject(pair.drafter_dir, transition=False)], answers)
    assert _chance_equal(bare, engines[0]) < 1e-6
    for generation in found[0].generations:
        for step in generation.steps:
            truth = generation.tokens[step.position + 1 - generation.prompt_tokens :]
            accepted = min(step.accepted, len(truth))
            assert step.drafted[:accepted] == truth[:accepted]
            if accepted < min(len(truth), GAMMA):
                assert step.drafted[accepted] != truth[accepted]


def _chance_equal(ours: Trace, theirs: Trace) -> float:
    """p-value of the homogeneity of steps by accepted drafts, rare counts skipped."""
    counts = np.zeros((2, GAMMA + 1))
    for row, trace in zip(counts, (ours, theirs), strict=True):
        for generation in trace.generations:
            for step in generation.steps:
                row[step.accepted] += 1
    counts = counts[:, counts.sum(0) >= 10]
    expected = counts.sum(1, keepdims=True) * counts.sum(0) / counts.sum()
    statistic, freedom = ((counts - expected) ** 2 / expected).sum(), counts.shape[1] - 1
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
