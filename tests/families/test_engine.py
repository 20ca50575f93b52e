"""Test every drafter in the reference engine: greedy output is plain decoding's.

Sampled output has the target's distribution.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation import engine as engine_module
from sglang_dspark.evaluation.engine import DecodeSettings, ReferenceEngine
from sglang_dspark.evaluation.records import Generation
from sglang_dspark.evaluation.statistics import ConfidencePairs
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.families.chain.model import ChainDrafter
from sglang_dspark.families.dflash.model import DFlashDrafter
from sglang_dspark.families.registry import FAMILIES
from sglang_dspark.training.store import Response
from sglang_dspark.verify import BatchSampling, target_distribution
from tests.evaluation.conftest import VOCAB
from tests.families.conftest import DRAFT_IDS, PROMPT, Lesson
from tests.families.helpers import GAMMA, KINDS, random_drafter
from tests.verify.mutants import residual_skipped

GREEDY = DecodeSettings(max_new_tokens=24, batch=3)


@pytest.fixture(scope="module")
def prompts(responses: list[Response]) -> list[list[int]]:
    """Beginnings that the drafters were taught on, of several lengths, and one of a single token
    that they were not."""
    lengths = (PROMPT, PROMPT + 9, PROMPT + 3, PROMPT)
    taught = [r.tokens[:n].tolist() for r, n in zip(responses, lengths, strict=False)]
    return [*taught, [77], [5, 90]]


@pytest.fixture(scope="module")
def plain(target: TargetModel, prompts: list[list[int]]) -> list[Generation]:
    return ReferenceEngine(target, None, GREEDY).run(prompts)


def _accepted(generations: list[Generation]) -> set[int]:
    return {step.accepted for g in generations for step in g.steps}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("slots", "gamma"), [(1, None), (4, None), (3, 1)])
def test_greedy_output_is_plain_decoding(
    kind: str,
    slots: int,
    gamma: int | None,
    target: TargetModel,
    lessons: dict[str, Lesson],
    prompts: list[list[int]],
    plain: list[Generation],
) -> None:
    settings = replace(GREEDY, batch=slots, gamma=gamma)
    engine = ReferenceEngine(target, lessons[kind].drafter, settings)
    assert engine.gamma == (gamma or GAMMA)
    generations = engine.run(prompts)
    assert [g.tokens for g in generations] == [g.tokens for g in plain]
    assert {0, 1} <= _accepted(generations), "accepts and rejections must both occur"
    assert all(step.confidence == () for g in generations for step in g.steps)
    assert len(ConfidencePairs.from_generations(generations).survival) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_full_draft_vocabulary(
    kind: str, target: TargetModel, prompts: list[list[int]], plain: list[Generation]
) -> None:
    """With random weights over all tokens few drafts are accepted; the output is still plain's."""
    drafter = random_drafter(kind, VOCAB, None)
    drafter.attach(target.embed_weight, target.head_weight)
    generations = ReferenceEngine(target, drafter, GREEDY).run(prompts)
    assert [g.tokens for g in generations] == [g.tokens for g in plain]
    assert all(len(step.drafted) == GAMMA for g in generations for step in g.steps)


def test_chain_runs_for_more_steps_than_trained(
    target: TargetModel,
    lessons: dict[str, Lesson],
    prompts: list[list[int]],
    plain: list[Generation],
) -> None:
    """MTP-1, MTP-3 and MTP-5 are the same weights; the first drafts do not depend on the rest."""
    drafted: dict[int, dict[tuple[int, int], tuple[int, ...]]] = {}
    for gamma in (1, 3, 5):
        settings = replace(GREEDY, gamma=gamma)
        generations = ReferenceEngine(target, lessons["mtp"].drafter, settings).run(prompts)
        assert [g.tokens for g in generations] == [g.tokens for g in plain]
        steps = ((i, s) for i, g in enumerate(generations) for s in g.steps)
        drafted[gamma] = {(i, s.position): s.drafted for i, s in steps}
    for short, long in ((1, 3), (3, 5)):
        common = drafted[short].keys() & drafted[long].keys()
        assert len(common) > 10
        assert all(drafted[long][at][:short] == drafted[short][at] for at in common)


def test_parallel_block_is_not_longer_than_trained(
    target: TargetModel, lessons: dict[str, Lesson]
) -> None:
    with pytest.raises(DSparkError, match=f"gamma 9 exceeds the block of {GAMMA}"):
        ReferenceEngine(target, lessons["dflash"].drafter, DecodeSettings(gamma=9))


@pytest.mark.parametrize("kind", KINDS)
def test_target_must_give_the_drafters_features(
    kind: str, target_dir: object, lessons: dict[str, Lesson], prompts: list[list[int]]
) -> None:
    other = TargetModel.load(str(target_dir), (1,))
    drafter = lessons[kind].drafter
    (family,) = (each for each in FAMILIES if each.name == kind)
    if not family.reads_features:  # the last hidden state alone
        assert ReferenceEngine(other, drafter, GREEDY).run(prompts[:1])
        return
    with pytest.raises(DSparkError, match=r"wants features of target layers \[0, 1\]"):
        ReferenceEngine(other, drafter, GREEDY)


ROWS = 800
SAMPLED = DecodeSettings(max_new_tokens=12, temperature=1.0, top_k=3, seed=7)


def _two_tokens(
    target: TargetModel, drafter: DFlashDrafter | ChainDrafter, text: list[int]
) -> tuple[list[tuple[int, int]], set[int]]:
    """The two tokens behind `text` in each of ROWS runs, by the engine's own steps, and the
    accepted counts. The last token of the text is the anchor that the first step starts from."""
    engine = ReferenceEngine(target, drafter, SAMPLED)
    run = engine_module._Run(engine, ROWS, len(text) + 3 * (engine.gamma + 1))
    prompt, every = torch.tensor([text[:-1]]).expand(ROWS, -1), torch.arange(ROWS)
    with torch.no_grad():
        out = target.forward(prompt, torch.zeros(ROWS, dtype=torch.long), run.cache)
        run.draft_state.prefill(every, prompt, out.features, out.hidden)
        run.requests = [engine_module._Request(r, len(text) - 1, text[-1:]) for r in range(ROWS)]
        run.anchor[:], run.lens[:] = text[-1], len(text) - 1
        for _ in range(2):
            run.step()
    tokens = [(r.tokens[1], r.tokens[2]) for r in run.requests]
    return tokens, {step.accepted for r in run.requests for step in r.steps}


def _distribution(target: TargetModel, text: list[int]) -> dict[tuple[int, ...], float]:
    """Probability of every pair of next tokens under plain sampling."""
    distribution: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(2):
        rows = torch.tensor([[*text, *row] for row in distribution])
        start = torch.zeros(len(rows), dtype=torch.long)
        out = target.forward(rows, start, target.new_cache(len(rows), rows.shape[1]))
        sampling = BatchSampling.uniform(len(rows), SAMPLED.temperature, SAMPLED.top_k)
        probs = target_distribution(target.logits(out.hidden[:, -1:]), sampling)[:, 0]
        distribution = {
            (*row, token): mass * float(p)
            for (row, mass), ps in zip(distribution.items(), probs, strict=True)
            for token, p in enumerate(ps)
            if p > 0
        }
    return distribution


def _p_value(observed: list[tuple[int, int]], distribution: dict[tuple[int, ...], float]) -> float:
    """Chi-square test; pairs that are expected less than five times are counted together."""
    counts = Counter(observed)
    assert counts.keys() <= distribution.keys(), "a token outside the target's support"
    common = [pair for pair, mass in distribution.items() if mass * len(observed) >= 5]
    assert len(common) >= 4
    expected = [distribution[pair] * len(observed) for pair in common]
    found = [counts[pair] for pair in common]
    if len(common) < len(distribution):
        expected.append(len(observed) - sum(expected))
        found.append(len(observed) - sum(found))
    statistic = sum((f - e) ** 2 / e for f, e in zip(found, expected, strict=True))
    half = torch.tensor([(len(found) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_output_has_the_targets_distribution(
    kind: str,
    target: TargetModel,
    lessons: dict[str, Lesson],
    responses: list[Response],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rule that draws corrections from the target's own distribution is caught (once).

    The drafter is made far too sure of one likely token, so that corrections matter.
    """
    text, drafter = responses[0].tokens[:30].tolist(), lessons[kind].drafter
    distribution = _distribution(target, text)
    draftable = [pair for pair in distribution if pair[0] in DRAFT_IDS]
    favourite = DRAFT_IDS.tolist().index(max(draftable, key=lambda pair: distribution[pair])[0])
    modest, bias = drafter.logits, torch.zeros(len(DRAFT_IDS))
    bias[favourite] = 12.0
    monkeypatch.setattr(drafter, "logits", lambda out: modest(out) + bias)
    tokens, accepted = _two_tokens(target, drafter, text)
    assert accepted >= {0, 1}
    assert _p_value(tokens, distribution) > 1e-5
    if kind == "eagle3":
        monkeypatch.setattr(engine_module, "accept_sampled", residual_skipped)
        tokens, _ = _two_tokens(target, drafter, text)
        assert _p_value(tokens, distribution) < 1e-5
