"""Compare the reference engine with plain decoding, Transformers, and exact probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from sglang_dspark.drafter import DSparkDrafter
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation import engine as engine_module
from sglang_dspark.evaluation.engine import DecodeSettings, ReferenceEngine
from sglang_dspark.evaluation.records import Generation
from sglang_dspark.verify import BatchSampling, target_distribution
from tests.evaluation.conftest import GAMMA, LAYERS, Pair
from tests.verify.mutants import residual_skipped

LENGTH = 24
GREEDY = DecodeSettings(max_new_tokens=LENGTH, batch=3)


@pytest.fixture(scope="module")
def plain(pair: Pair, prompts: list[list[int]]) -> list[Generation]:
    return ReferenceEngine(pair.target, None, GREEDY).run(prompts)


def _hf_logits(pair: Pair, tokens: Sequence[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Logits [T, V] and hidden states of Transformers' own forward pass, no cache."""
    model = AutoModelForCausalLM.from_pretrained(pair.target_dir, dtype=torch.float32)
    with torch.no_grad():
        out = model(torch.tensor([list(tokens)]), output_hidden_states=True)
    return out.logits[0], out.hidden_states


def test_plain_engine_is_transformers_greedy(
    pair: Pair, prompts: list[list[int]], plain: list[Generation]
) -> None:
    for prompt, generation in zip(prompts, plain, strict=True):
        assert len(generation.tokens) == LENGTH
        logits, _ = _hf_logits(pair, [*prompt, *generation.tokens])
        chosen = logits[len(prompt) - 1 : -1].argmax(-1)
        assert generation.tokens == tuple(chosen.tolist())
        assert len(set(generation.tokens)) > 5, "a constant text would prove nothing"


@pytest.mark.parametrize("gamma", [1, 2, GAMMA])
@pytest.mark.parametrize("batch", [1, 3, 20])
def test_greedy_output_is_plain_decoding(
    pair: Pair, prompts: list[list[int]], plain: list[Generation], gamma: int, batch: int
) -> None:
    settings = replace(GREEDY, batch=batch, gamma=gamma)
    engine = ReferenceEngine(pair.target, pair.drafter, settings)
    assert engine.gamma == gamma
    generations = engine.run(prompts)
    assert [g.tokens for g in generations] == [g.tokens for g in plain]
    counts = {step.accepted for g in generations for step in g.steps}
    assert counts == set(range(gamma + 1)), "accepts and rejections of every length must occur"


def test_steps_tell_what_happened(pair: Pair, prompts: list[list[int]]) -> None:
    for g in ReferenceEngine(pair.target, pair.drafter, GREEDY).run(prompts):
        done = 1
        for step in g.steps:
            assert step.position == g.prompt_tokens + done - 1
            kept_drafts = min(step.accepted, step.kept)
            assert step.drafted[:kept_drafts] == g.tokens[done : done + kept_drafts]
            assert all(0 < c < 1 for c in step.confidence)
            done += step.kept
        assert all(step.kept == step.accepted + 1 for step in g.steps[:-1])
        assert g.finish == "length"


def test_drafts_come_from_the_target_features_before_the_anchor(
    pair: Pair, prompts: list[list[int]]
) -> None:
    """Every recorded draft equals one recomputed from Transformers' hidden states."""
    generation = ReferenceEngine(pair.target, pair.drafter, GREEDY).run(prompts)[5]
    text = [*prompts[5], *generation.tokens]
    _, hidden_states = _hf_logits(pair, text)
    features = torch.cat([hidden_states[layer + 1] for layer in LAYERS[:-1]], -1)
    # Transformers norms the last entry; take the last layer's output from our own full pass.
    cache = pair.target.new_cache(1, len(text))
    ours = pair.target.forward(torch.tensor([text]), torch.zeros(1, dtype=torch.long), cache)
    width = features.shape[-1]
    assert torch.allclose(ours.features[..., :width], features, atol=1e-4)
    for step in generation.steps:
        block = _redraft(pair.drafter, ours.features[:, : step.position], text[step.position])
        assert tuple(block.tokens[0].tolist()) == step.drafted
        assert torch.allclose(block.confidence[0], torch.tensor(step.confidence), atol=1e-4)


@torch.no_grad()
def _redraft(drafter: DSparkDrafter, features: Tensor, anchor: int):  # type: ignore[no-untyped-def]
    length = torch.tensor([features.shape[1]])
    context = drafter.context_kv(features, torch.arange(features.shape[1])[None])
    token = torch.tensor([anchor])
    return drafter.draft(token, drafter.forward_block(token, length, context, length))


def test_stop_token_ends_a_request_and_is_kept(
    pair: Pair, prompts: list[list[int]], plain: list[Generation]
) -> None:
    stop = plain[3].tokens[10]
    settings = replace(GREEDY, stop_ids=frozenset({stop}))
    stopped = ReferenceEngine(pair.target, pair.drafter, settings).run(prompts)
    cut_inside_a_step = False
    for full, g in zip(plain, stopped, strict=True):
        has_stop = stop in full.tokens
        expected = full.tokens[: full.tokens.index(stop) + 1] if has_stop else full.tokens
        assert g.tokens == expected
        assert g.finish == ("stop" if has_stop else "length")
        cut_inside_a_step |= bool(g.steps) and g.steps[-1].kept <= g.steps[-1].accepted
    assert stopped[3].finish == "stop"
    assert cut_inside_a_step, "some step must have been cut by the stop or the limit"


@pytest.mark.parametrize("max_new_tokens", [1, 2, 5])
def test_token_limit(
    pair: Pair, prompts: list[list[int]], plain: list[Generation], max_new_tokens: int
) -> None:
    settings = replace(GREEDY, max_new_tokens=max_new_tokens)
    seen: list[int] = []
    generations = ReferenceEngine(pair.target, pair.drafter, settings).run(
        prompts, lambda index, _: seen.append(index)
    )
    assert sorted(seen) == list(range(len(prompts)))
    for full, g in zip(plain, generations, strict=True):
        assert g.tokens == full.tokens[:max_new_tokens]
        assert bool(g.steps) == (max_new_tokens > 1)


REPEATS = 1500
SAMPLED = DecodeSettings(max_new_tokens=3, temperature=2.0, top_k=3, batch=500, seed=7)


def _sampled_p_value(pair: Pair, drafter: DSparkDrafter | None, settings: DecodeSettings) -> float:
    """Chi-square of the first three tokens over many runs of one prompt against the target."""
    prompt = [11, 3, 90]
    runs = ReferenceEngine(pair.target, drafter, settings).run([prompt] * REPEATS)
    distribution = {(): 1.0}
    for _ in range(3):
        rows = list(distribution)
        cache = pair.target.new_cache(len(rows), 8)
        out = pair.target.forward(
            torch.tensor([[*prompt, *row] for row in rows]),
            torch.zeros(len(rows), dtype=torch.long),
            cache,
        )
        sampling = BatchSampling.uniform(len(rows), settings.temperature, settings.top_k)
        probs = target_distribution(pair.target.logits(out.hidden[:, -1:]), sampling)[:, 0]
        distribution = {
            (*row, token): distribution[row] * float(p)
            for row, ps in zip(rows, probs, strict=True)
            for token, p in enumerate(ps)
            if p > 0
        }
    counts = dict.fromkeys(distribution, 0)
    for generation in runs:
        counts[generation.tokens] += 1  # a KeyError is a token outside the target's support
    expected = torch.tensor(list(distribution.values()), dtype=torch.float64) * REPEATS
    observed = torch.tensor([counts[key] for key in distribution], dtype=torch.float64)
    assert float(expected.min()) > 5
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(distribution) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.mark.parametrize("rule", ["token", "block"])
def test_sampled_output_has_the_targets_distribution(
    pair: Pair, rule: Literal["token", "block"]
) -> None:
    assert _sampled_p_value(pair, pair.drafter, replace(SAMPLED, rule=rule)) > 1e-5


def test_sampled_mutant_is_caught(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "accept_sampled", residual_skipped)
    assert _sampled_p_value(pair, pair.drafter, SAMPLED) < 1e-5


def test_sampling_is_repeatable_and_seeded(pair: Pair, prompts: list[list[int]]) -> None:
    settings = replace(GREEDY, temperature=1.0, top_p=0.9, seed=3)
    first = ReferenceEngine(pair.target, pair.drafter, settings).run(prompts)
    again = ReferenceEngine(pair.target, pair.drafter, settings).run(prompts)
    other = ReferenceEngine(pair.target, pair.drafter, replace(settings, seed=4)).run(prompts)
    assert first == again
    assert first != other


def test_bad_input_is_refused_in_one_line(pair: Pair, prompts: list[list[int]]) -> None:
    with pytest.raises(DSparkError, match=f"gamma 9 exceeds the block of {GAMMA}"):
        ReferenceEngine(pair.target, pair.drafter, DecodeSettings(gamma=9))
    engine = ReferenceEngine(pair.target, pair.drafter, GREEDY)
    with pytest.raises(DSparkError, match="prompt 1 is empty"):
        engine.run([[1], []])
    with pytest.raises(DSparkError, match="exceeds the target's 256 positions"):
        engine.run([[1] * 240])
    with pytest.raises(DSparkError, match="no prompts"):
        engine.run([])
    with pytest.raises(DSparkError, match="top_p must lie"):
        DecodeSettings(top_p=0.0)
    with pytest.raises(DSparkError, match="max_new_tokens must be at least 1"):
        DecodeSettings(max_new_tokens=0)


def test_target_must_give_the_drafters_features(pair: Pair) -> None:
    from sglang_dspark.evaluation.target import TargetModel

    other = TargetModel.load(pair.target_dir, (0,))
    with pytest.raises(DSparkError, match=r"wants features of target layers \[0, 1\]"):
        ReferenceEngine(other, pair.drafter, GREEDY)
