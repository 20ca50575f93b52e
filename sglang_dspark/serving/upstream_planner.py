"""Call upstream's budget and top-K functions (SGLang's dspark_planner and dspark_schedule) as its
planner does, to time our planner against them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_dspark.serving import upstream


class UpstreamPlanner:
    """The two functions, with upstream's table for the given token curve."""

    def __init__(self, gamma: int, tokens: NDArray, probes: Sequence[int] = ()) -> None:
        """Make the table. tokens: seconds of a pass over B = 0, 1, .. tokens. probes: batch sizes
        at which the table was measured; by default every 8th."""
        measured = probes or range(8, len(tokens), 8)
        table = [(int(b), 1.0 / float(tokens[b])) for b in measured]
        self._config = upstream.DSparkScheduleConfig(gamma=gamma)
        self._table = upstream.profile_sps_table(probes=table)
        self._budget = upstream.compute_verify_token_budget
        self._topk = upstream.ScheduleVerifyLensTopk.execute

    def budget(self, confidence: Tensor) -> int:
        """Compute K from lagged confidences [R, gamma] float32."""
        survival = torch.cumprod(confidence, dim=1)
        decision = self._budget(
            history_survival_probs=survival, sps_table=self._table, cfg=self._config
        )
        return int(decision.budget)

    def topk(self, confidence: Tensor, budget: int) -> Tensor:
        """Compute verify lengths with anchor, [R] int32, from this step's confidences."""
        return self._topk(confidence=confidence, budget=budget, cfg=self._config)
