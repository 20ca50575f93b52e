"""Collect the statistics of finished steps that plans use: confidences, rates, times, losses.

A plan reads confidences through a relay that lags, never those of the step it plans. This makes a
schedule lossless (docs/losslessness.md).
"""

from __future__ import annotations

from sglang_dspark.schedule.budget import Counts, Gains
from sglang_dspark.schedule.cost_model import CostModel, Step
from sglang_dspark.schedule.estimator import AcceptanceEstimator
from sglang_dspark.schedule.plan import Plan, PlannerConfig
from sglang_dspark.schedule.relay import Relay
from sglang_dspark.schedule.wasted_tokens import Delivered


class Experience:
    """Relay, acceptance rates, step times and delivered shares of one engine."""

    def __init__(self, gamma: int, pool_rows: int, costs: CostModel, config: PlannerConfig) -> None:
        """Create empty statistics. Raises ValueError if the step times are for another gamma."""
        if costs.table.gamma != gamma:
            raise ValueError(
                f"step times are for gamma {costs.table.gamma}, the drafter has {gamma}"
            )
        self.gamma = gamma
        self.signal = config.signal  # admission uses it
        self.costs = costs
        self.relay = Relay(pool_rows, gamma, lag=config.lag, max_age=config.max_age)
        self.estimator = AcceptanceEstimator(gamma, config.estimator)
        self.delivered = Delivered()

    def confidence(
        self, step: int, rows: Counts, generations: Counts, relay_arrived: bool
    ) -> tuple[Gains, int]:
        """Return confidences for step `step` [R, gamma] float32, and the number of known rows."""
        prior = self.estimator.prior()
        if not relay_arrived:
            return self.relay.unknown(len(rows), prior)[0], 0
        resolved = self.relay.resolve(step, rows, generations, prior)
        return resolved.confidence, int(resolved.fresh.sum())

    def publish(self, plan: Plan, rows: Counts, generations: Counts, confidence: Gains) -> None:
        """Publish a step's confidences; beyond the planned depth the prior is used."""
        depth = plan.budget.depth
        if depth < self.gamma:
            confidence = confidence.copy()
            confidence[:, depth:] = self.estimator.prior()[depth:]
        self.relay.publish(plan.step, rows, generations, confidence)

    def timed(self, plan: Plan, verified: Counts, seconds: float) -> bool:
        """Learn a step's time; return False if it is an outlier."""
        tokens = plan.requests + int(verified.sum())
        did = Step(plan.requests, tokens, plan.context, plan.budget.depth)
        return self.costs.observe(did, seconds)
