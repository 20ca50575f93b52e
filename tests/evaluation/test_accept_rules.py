"""The comparison of the two rules: both are right about themselves, and on the same drafts."""

from __future__ import annotations

import json
import math

import pytest
import torch

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.accept_rules import RULES, Judge, compare
from sglang_dspark.evaluation.engine import DecodeSettings, ReferenceEngine
from tests.evaluation.conftest import Pair


def _steps(rows: int, gamma: int, vocab: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    proposal = torch.softmax(torch.randn(1, gamma, vocab, generator=generator), -1)
    shift = torch.randn(1, gamma + 1, vocab, generator=generator)
    target = torch.softmax(torch.cat([proposal, proposal[:, :1]], 1).log() + shift, -1)
    draft = torch.multinomial(proposal[0], rows, replacement=True, generator=generator).T
    uniforms = torch.rand(rows, gamma + 1, generator=generator, dtype=torch.float64)
    proposal, target = proposal.expand(rows, -1, -1), target.expand(rows, -1, -1)
    return draft, proposal, target, uniforms[:, :gamma], uniforms[:, gamma]


def test_each_rule_keeps_what_its_chances_say() -> None:
    rows = 40_000
    taus = {}
    for rule in RULES:
        judge = Judge(rule)
        judge(*_steps(rows, 4, 6))
        assert judge.steps == rows
        assert judge.tau() == pytest.approx(judge.expected_tau(rule), abs=5 * 4 / math.sqrt(rows))
        assert judge.expected_tau("block") > judge.expected_tau("token") + 0.05
        assert torch.equal(judge.chances["block"][0], judge.chances["token"][0])
        taus[rule] = judge.tau()
    assert taus["block"] > taus["token"]


def test_runs_of_both_rules_are_compared(pair: Pair, prompts: list[list[int]]) -> None:
    settings = [
        DecodeSettings(max_new_tokens=12, temperature=1.5, batch=4, seed=s) for s in range(3)
    ]
    order = []
    found = compare(
        lambda each, judge: ReferenceEngine(pair.target, pair.drafter, each, judge),
        prompts,
        settings,
        lambda number, rule: order.append((number, rule)),
    )
    assert order == [
        (0, "block"), (0, "token"), (1, "token"), (1, "block"), (2, "block"), (2, "token"),
    ]  # fmt: skip
    assert found.same_drafts.low <= found.same_drafts.mid <= found.same_drafts.high
    assert found.same_drafts.mid >= 1
    metrics = json.loads(json.dumps(found.metrics()))
    chances = metrics["cumulative_chances"]
    pairs = zip(chances["block"], chances["token"], strict=True)
    assert all(block >= token - 1e-12 for block, token in pairs)
    steps = [trial["block"]["steps"] for trial in metrics["trials"]]
    assert steps == [trial["block"].steps for trial in found.trials]
    assert min(steps) > 0


def test_what_cannot_be_compared_is_refused(pair: Pair, prompts: list[list[int]]) -> None:
    def engine_of(each: DecodeSettings, judge: Judge) -> ReferenceEngine:
        return ReferenceEngine(pair.target, pair.drafter, each, judge)

    with pytest.raises(DSparkError, match="temperature above 0"):
        compare(engine_of, prompts, [DecodeSettings()])
    draft, _, *rest = _steps(2, 2, 4)
    with pytest.raises(DSparkError, match="argmax"):
        Judge("block")(draft, None, *rest)
