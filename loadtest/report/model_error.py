"""Compare the interactive section's model with the sweep's measurements."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dspark.loadtest.report.data import Run, policy_of, threshold_of
from sglang_dspark.loadtest.report.page_model import MIX, LoadModel
from sglang_dspark.loadtest.report.page_reference import Choice, outcome

MISSED = 0.15  # an error above it: the page marks the model's curve there


@dataclass(frozen=True)
class ModelError:
    """An arm at one load of the closed loop. found, seen: the model's tokens/s and the measured;
    drafts, verify_length: drafts verified a step and request, of the model and measured."""

    arm: str
    policy: str
    users: int
    found: float
    seen: float
    drafts: float
    verify_length: float | None

    @property
    def error(self) -> float:
        """Return the model's throughput over the measured one, less 1."""
        return self.found / self.seen - 1

    @property
    def missed(self) -> bool:
        """Return whether the error is too large to use the model here."""
        return abs(self.error) > MISSED


def model_errors(run: Run, model: LoadModel) -> list[ModelError]:
    """Compare at every load of every arm whose policy the page models."""
    found = []
    for name in run.arms:
        policy = policy_of(run.arm(name))
        for level in run.levels(name, "closed"):
            users = round(level.level)
            if policy is None or level.tokens_per_s is None or users > model.most:
                continue
            choice = Choice(MIX, policy, users, model.gamma, threshold_of(run), model.spread)
            made, seen = outcome(model, choice), level.tokens_per_s.mid
            found.append(
                ModelError(
                    name, policy, users, made.tokens_per_s, seen, made.drafts, level.verify_length
                )
            )
    return found
