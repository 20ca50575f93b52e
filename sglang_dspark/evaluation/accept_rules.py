"""Compare the two rules that judge sampled drafts: by block (`verify/block.py`), token by token.

The reference engine decodes the same prompts with each rule, several times. At every step, both
rules' chances that drafts 1..k are kept, given the drafts, are recorded: p_k, and the product of
min(1, p_t / p_d). So the rules are compared on the same drafts, without the noise of the verdicts,
and also by the drafts that each rule kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.engine import DecodeSettings, ReferenceEngine
from sglang_dspark.intervals import Ratio, paired_ratio
from sglang_dspark.verify import Acceptance, accept_block, accept_sampled
from sglang_dspark.verify.block import standing
from sglang_dspark.verify.rejection import mass_of

RuleName = Literal["block", "token"]
RULES: tuple[RuleName, RuleName] = ("block", "token")
_JUDGES = {"block": accept_block, "token": accept_sampled}


@dataclass
class Judge:
    """An accept rule that counts its steps.

    steps, kept: verify steps, and the drafts that they kept. chances: for each rule, the sum over
    all steps of the chance [gamma] that drafts 1..k are kept.
    """

    rule: RuleName
    steps: int = 0
    kept: int = 0
    chances: dict[RuleName, Tensor] = field(default_factory=dict)

    def __call__(
        self,
        draft: Tensor,
        draft_probs: Tensor | None,
        target_probs: Tensor,
        accept_uniforms: Tensor,
        bonus_uniforms: Tensor,
    ) -> Acceptance:
        """Judge drafts like `verify.accept_sampled`. Raises DSparkError for drafts not sampled."""
        if draft_probs is None:
            raise DSparkError(
                "of drafts that are an argmax both rules are one: name a drafter that samples"
            )
        found = {
            "block": standing(draft, draft_probs, target_probs)[:, 1:],
            "token": token_by_token(draft, draft_probs, target_probs),
        }
        for rule in RULES:
            self.chances[rule] = self.chances.get(rule, 0.0) + found[rule].sum(0)
        outcome = _JUDGES[self.rule](
            draft, draft_probs, target_probs, accept_uniforms, bonus_uniforms
        )
        self.steps += len(draft)
        self.kept += int(outcome.accepted.sum())
        return outcome

    def tau(self) -> float:
        """Return the tokens per step, bonus included."""
        return 1 + self.kept / self.steps

    def expected_tau(self, rule: RuleName) -> float:
        """Return the rule's expected tau on these drafts, over its uniforms."""
        return 1 + float(self.chances[rule].sum()) / self.steps


def token_by_token(draft: Tensor, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """Return the chance that drafts 1..k are all kept, each judged alone; [R, gamma] float64."""
    wanted = mass_of(draft, target_probs[:, : draft.shape[1]])
    proposed = mass_of(draft, draft_probs)
    enough = (wanted > 0).double()
    return torch.where(wanted < proposed, wanted / proposed, enough).cumprod(1)


@dataclass(frozen=True)
class Compared:
    """Trials, each with a judge of every rule.

    same_drafts: expected tau of block over token, on the drafts of all steps. kept: tau of block
    over token, each in its own run.
    """

    trials: tuple[Mapping[RuleName, Judge], ...]
    same_drafts: Ratio
    kept: Ratio

    def metrics(self) -> dict[str, Any]:
        """Return the metrics of a result file."""
        return {
            "same_drafts": _json(self.same_drafts),
            "own_runs": _json(self.kept),
            "cumulative_chances": {
                rule: _mean_chances([judge for t in self.trials for judge in t.values()], rule)
                for rule in RULES
            },
            "trials": [
                {
                    run: {
                        "steps": judge.steps,
                        "tau": judge.tau(),
                        "expected_tau": {rule: judge.expected_tau(rule) for rule in RULES},
                    }
                    for run, judge in trial.items()
                }
                for trial in self.trials
            ],
        }


def compare(
    engine_of: Callable[[DecodeSettings, Judge], ReferenceEngine],
    prompts: Sequence[Sequence[int]],
    settings: list[DecodeSettings],
    on_run: Callable[[int, RuleName], None] = lambda _trial, _rule: None,
) -> Compared:
    """Run a trial for each of the settings; the rule that runs first alternates between trials.

    engine_of: returns the engine for some settings that uses a judge. Raises DSparkError at
    temperature 0, where both rules are the same.
    """
    if any(each.temperature == 0 for each in settings):
        raise DSparkError("greedy drafts have one rule: compare at a temperature above 0")
    trials = []
    for number, each in enumerate(settings):
        judges: dict[RuleName, Judge] = {}
        for rule in RULES if number % 2 == 0 else RULES[::-1]:
            on_run(number, rule)
            judges[rule] = Judge(rule)
            engine_of(each, judges[rule]).run(prompts)
        trials.append(judges)
    return Compared(
        tuple(trials),
        same_drafts=paired_ratio(_pooled(trials, "block"), _pooled(trials, "token")),
        kept=paired_ratio(
            [trial["block"].tau() for trial in trials], [trial["token"].tau() for trial in trials]
        ),
    )


def _pooled(trials: Sequence[Mapping[RuleName, Judge]], rule: RuleName) -> list[float]:
    """Return the rule's expected tau over both runs of each trial."""
    return [
        sum(j.expected_tau(rule) * j.steps for j in trial.values())
        / sum(j.steps for j in trial.values())
        for trial in trials
    ]


def _mean_chances(judges: Sequence[Judge], rule: RuleName) -> list[float]:
    """Return the chance [gamma] that drafts 1..k are kept, averaged over all steps."""
    total = sum((judge.chances[rule] for judge in judges[1:]), judges[0].chances[rule])
    mean: list[float] = (total / sum(judge.steps for judge in judges)).tolist()
    return mean


def _json(ratio: Ratio) -> dict[str, Any]:
    return {"block_over_token": ratio.mid, "interval": ratio.bounds, "method": ratio.method}
