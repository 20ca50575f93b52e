"""Compare replay on given answers with decoding: equal steps (greedy), distribution (sampled)."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from sglang_dspark.evaluation.calibration_data import observations
from sglang_dspark.evaluation.engine import DecodeSettings, ReferenceEngine
from sglang_dspark.evaluation.records import Generation
from sglang_dspark.evaluation.replay import Answer, Replay, draw_column, draw_given_answer
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.schedule.calibration import Observations
from tests.evaluation.conftest import EOS, GAMMA, Pair


def _upper_tail(counts: list[int], expected: np.ndarray, freedom: int) -> float:
    """p-value of Pearson's statistic."""
    statistic = float(((np.array(counts) - expected) ** 2 / expected).sum())
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def _answers(
    target: TargetModel, prompts: list[list[int]], generations: list[Generation]
) -> list[Answer]:
    """The generations as the target's answers, with its states in float32."""
    found = []
    for prompt, generation in zip(prompts, generations, strict=True):
        tokens = torch.tensor([*prompt, *generation.tokens])
        cache = target.new_cache(1, len(tokens))
        out = target.forward(tokens[None], torch.zeros(1, dtype=torch.long), cache)
        found.append(Answer(tokens, len(prompt), out.features[0], out.hidden[0]))
    return found


def test_greedy_replay_is_the_engine_step_by_step(pair: Pair, prompts: list[list[int]]) -> None:
    settings = DecodeSettings(max_new_tokens=24, stop_ids=frozenset({EOS}))
    decoded = ReferenceEngine(pair.target, pair.drafter, settings).run(prompts)
    replay = Replay(pair.target, pair.drafter, 0.0, stop_ids=settings.stop_ids)
    replayed = replay.run(_answers(pair.target, prompts, decoded))
    compared = 0
    for ours, theirs in zip(replayed, decoded, strict=True):
        assert (ours.tokens, ours.finish) == (theirs.tokens, theirs.finish)
        assert [s.position for s in ours.steps] == [s.position for s in theirs.steps]
        for a, b in zip(ours.steps, theirs.steps, strict=True):
            assert a.drafted == b.drafted
            assert a.kept == b.kept
            assert a.accepted == min(b.accepted, a.verify_len)
            assert np.allclose(a.confidence, b.confidence, atol=1e-5)
            compared += a.accepted
    assert compared > 20, "some drafts must be accepted for this to say anything"


def test_drafts_beyond_the_answer_are_censored(pair: Pair, prompts: list[list[int]]) -> None:
    plain = ReferenceEngine(pair.target, None, DecodeSettings(max_new_tokens=2)).run(prompts)
    answers = _answers(pair.target, prompts, plain)
    for temperature in (0.0, 1.0):
        for generation in Replay(pair.target, pair.drafter, temperature).run(answers):
            (step,) = generation.steps
            assert (step.verify_len, step.kept) == (1, 1)
    single = replace(answers[0], tokens=answers[0].tokens[:-1])
    assert Replay(pair.target, pair.drafter, 0.0).run([single])[0].steps == ()


def test_sampled_replay_accepts_as_often_as_the_engine(
    pair: Pair, prompts: list[list[int]]
) -> None:
    many = prompts * 16
    settings = DecodeSettings(max_new_tokens=12, temperature=1.0, batch=64)
    decoded = ReferenceEngine(pair.target, pair.drafter, settings).run(many)
    plain = ReferenceEngine(pair.target, None, replace(settings, seed=1)).run(many)
    replayed = Replay(pair.target, pair.drafter, 1.0).run(_answers(pair.target, many, plain))
    ours, theirs = observations(replayed, GAMMA), observations(decoded, GAMMA)
    done = [np.cumsum([0, *(step.kept for step in g.steps)])[:-1] for g in decoded]
    left = 11 - np.concatenate(done)  # [N] tokens behind the anchor of each step of the engine
    for k in range(1, GAMMA + 1):
        # The engine verifies every draft; skip those that the replay would have censored.
        hits = np.array(
            [(data.survived(k) & rows).sum() for data, rows in _both(ours, theirs, left, k)]
        )
        sizes = np.array([rows.sum() for _, rows in _both(ours, theirs, left, k)])
        share = hits.sum() / sizes.sum()
        counts = [*hits.tolist(), *(sizes - hits).tolist()]
        expected = np.concatenate([sizes * share, sizes * (1 - share)])
        assert _upper_tail(counts, expected, 1) > 1e-3, (k, counts)


def _both(ours: Observations, theirs: Observations, left: np.ndarray, k: int):
    return ((ours, ours.known(k)), (theirs, left >= k))


def test_a_kept_partition_spares_the_vocabulary_and_changes_nothing(
    pair: Pair, prompts: list[list[int]]
) -> None:
    settings = DecodeSettings(max_new_tokens=12, temperature=1.0)
    plain = ReferenceEngine(pair.target, None, settings).run(prompts)
    bare = _answers(pair.target, prompts, plain)
    kept = [replace(a, log_partition=pair.target.logits(a.hidden).logsumexp(-1)) for a in bare]
    ours, theirs = (Replay(pair.target, pair.drafter, 1.0).run(each) for each in (kept, bare))
    assert ours == theirs


@pytest.mark.parametrize("outside", [0.0, 0.3])
def test_a_draft_given_the_answer_has_the_distribution_of_decoding(outside: float) -> None:
    """Joint distribution of (draft, accepted, y): x ~ q and the accept rule; y ~ p and the replay.

    outside: mass of p on tokens that the draft vocabulary lacks.
    """
    rng = torch.Generator().manual_seed(0)
    q = torch.tensor([0.5, 0.3, 0.2, 0.0], dtype=torch.float64)
    p = (1 - outside) * torch.tensor([0.2, 0.4, 0.1, 0.3], dtype=torch.float64)
    full = torch.cat([p, torch.tensor([outside], dtype=torch.float64)])  # [V], the last one outside
    n = 40_000
    y = torch.multinomial(full, n, replacement=True, generator=rng)
    column = torch.where(y < 4, y, -1)
    x, kept = draw_given_answer(q.expand(n, -1), p.expand(n, -1), column, rng)
    found = Counter(zip(x.tolist(), kept.tolist(), y.tolist(), strict=True))
    residual = torch.cat([(p - q).clamp(min=0), full[4:]])
    correction = residual / residual.sum()
    expected: dict[tuple[int, bool, int], float] = {}
    for token in range(4):
        accept = min(1.0, float(p[token] / q[token])) if q[token] > 0 else 0.0
        expected[token, True, token] = float(q[token]) * accept
        for emitted in range(5):
            expected[token, False, emitted] = (
                float(q[token]) * (1 - accept) * float(correction[emitted])
            )
    cells = [cell for cell, chance in expected.items() if chance > 0]
    assert set(found) <= set(cells), "something that decoding never does"
    counts = [found[cell] for cell in cells]
    chances = np.array([expected[cell] for cell in cells])
    assert abs(chances.sum() - 1) < 1e-6
    assert _upper_tail(counts, n * chances, len(cells) - 1) > 1e-3
    assert _upper_tail(counts, n * np.roll(chances, 1), len(cells) - 1) < 1e-12


def test_a_column_is_drawn_as_often_as_it_weighs() -> None:
    weight = torch.tensor([0.0, 3.0, 0.0, 1e-3, 1.0, 0.0]).repeat(20_000, 1)
    drawn = draw_column(weight, torch.Generator().manual_seed(0))
    share = torch.bincount(drawn, minlength=6) / len(weight)
    wanted = weight[0] / weight[0].sum()
    assert not share[wanted == 0].any()
    spread = (wanted * (1 - wanted) / len(weight)).sqrt()
    assert bool(((share - wanted).abs() <= 4 * spread).all())
