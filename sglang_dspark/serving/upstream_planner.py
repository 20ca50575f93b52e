"""Upstream's budget and top-K functions (SGLang's dspark_planner and dspark_schedule), called
as its planner calls them: what our planner is timed against.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_dspark.serving import upstream


class UpstreamPlanner:
    """The two functions, with a table of the given token curve as upstream would have it."""

    def __init__(self, gamma: int, tokens: NDArray, probes: Sequence[int] = ()) -> None:
        """tokens: seconds of a pass over B = 0, 1, .. tokens. probes: batch sizes that the table
        was measured at; by default every 8th."""
        measured = probes or range(8, len(tokens), 8)
        table = [(int(b), 1.0 / float(tokens[b])) for b in measured]
        self._config = upstream.DSparkScheduleConfig(gamma=gamma)
        self._table = upstream.profile_sps_table(probes=table)
        self._budget = upstream.compute_verify_token_budget
        self._topk = upstream.ScheduleVerifyLensTopk.execute

    def budget(self, confidence: Tensor) -> int:
        """K from lagged confidences [R, gamma] float32."""
        survival = torch.cumprod(confidence, dim=1)
        decision = self._budget(
            history_survival_probs=survival, sps_table=self._table, cfg=self._config
        )
        return int(decision.budget)

    def topk(self, confidence: Tensor, budget: int) -> Tensor:
        """Verify lengths with anchor, [R] int32, from this step's confidences."""
        return self._topk(confidence=confidence, budget=budget, cfg=self._config)
