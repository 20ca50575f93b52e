"""Train the DSpark drafter with experts.

It trains like the dense one; after each step the biases of the routers also move towards equal
loads (drafter/moe.py). There is no auxiliary loss.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from sglang_dspark.drafter.model import DSparkDrafter
from sglang_dspark.drafter.moe import balance_experts
from sglang_dspark.families.dspark.learner import DSparkLearner, start
from sglang_dspark.families.dspark.shape import MoEShape
from sglang_dspark.families.learning.learner import Ingredients
from sglang_dspark.families.learning.objective import ObjectiveConfig
from sglang_dspark.families.learning.target_head import TargetHead


class MoELearner(DSparkLearner):
    """See `families.learning.learner.Learner`."""

    def __init__(
        self, drafter: DSparkDrafter, head: TargetHead, objective: ObjectiveConfig, rate: float
    ):
        """Extend `DSparkLearner` by rate, the step of the biases, see `balance_experts`."""
        super().__init__(drafter, head, objective)
        self.rate = rate

    def after_backward(self) -> None:
        """Update the biases by the loads of the step; they are buffers without gradients."""
        super().after_backward()
        balance_experts(self.module, self.rate, _over_processes)


def _over_processes(load: Tensor) -> Tensor:
    """Sum the tokens of each expert [E] over all processes, so that their biases stay equal."""
    if dist.is_initialized():
        dist.all_reduce(load)
    return load


def build(ingredients: Ingredients) -> MoELearner:
    """Build the learner like the dense drafter's; experts start as parts of the target's MLPs."""
    shape = ingredients.shape
    assert isinstance(shape, MoEShape)
    return MoELearner(*start(ingredients), ingredients.objective, shape.balance_rate)
