"""Update weights by AdamW with warm-up, cosine and clipping, and average them over steps.

Everything works on the rows that a process holds, so that one process and many share the code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sglang_dspark.families.learning.shards import local
from sglang_dspark.training.config import ScheduleConfig
from sglang_dspark.training.distributed import World, rows_of, whole

EMA_EVERY = 8
_NOT_DECAYED = ("norm", "bias", "embed", "markov_head")  # tables, gains: decay is for projections


def learning_rate(step: int, s: ScheduleConfig) -> float:
    """Return the rate: linear warm-up, then cosine to 2% of the peak at the last step."""
    if step < s.warmup_steps:
        return s.learning_rate * (step + 1) / s.warmup_steps
    done = (step - s.warmup_steps) / max(s.steps - s.warmup_steps, 1)
    return s.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


class Optimiser:
    """AdamW over the trainable parameters of a module, which is sharded already if it is to be."""

    def __init__(self, module: nn.Module, schedule: ScheduleConfig, world: World):
        self.schedule, self.world = schedule, world
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in named]
        self.shards = [local(p.detach()) for p in self.parameters]  # share the parameters' memory
        self.buffers = _kept_buffers(module)
        decayed = [not any(word in name for word in _NOT_DECAYED) for name, _ in named]
        groups = [
            {
                "params": [s for s, d in zip(self.shards, decayed, strict=True) if d == yes],
                "weight_decay": schedule.weight_decay * yes,
            }
            for yes in (True, False)
        ]
        self.adam = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=schedule.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.average = [s.clone() for s in self.shards] if schedule.ema else None

    def step(self, number: int) -> None:
        """Clip the gradients, update with the rate of step `number`, and move the average."""
        s = self.schedule
        grads = [
            torch.zeros_like(shard) if p.grad is None else local(p.grad)
            for p, shard in zip(self.parameters, self.shards, strict=True)
        ]
        squares = torch.stack([n.square() for n in torch._foreach_norm(grads)]).sum()
        # Replicated gradients would be counted once per process; shards are disjoint.
        norm = self.world.sum(squares).sqrt()
        torch._foreach_mul_(grads, torch.clamp(s.clip / (norm + 1e-6), max=1.0))
        for shard, grad in zip(self.shards, grads, strict=True):
            shard.grad = grad
        for group in self.adam.param_groups:
            group["lr"] = learning_rate(number, s)
        self.adam.step()
        for p in self.parameters:
            p.grad = None
        done = number + 1
        if self.average is not None and done % EMA_EVERY == 0:
            decay = min(s.ema, (1 + done) / (10 + done)) ** EMA_EVERY
            torch._foreach_lerp_(self.average, self.shards, 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Exchange the parameters with their averages within this context."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def _exchange(self) -> None:
        for shard, average in zip(self.shards, self.average or (), strict=bool(self.average)):
            kept = shard.clone()
            shard.copy_(average)
            average.copy_(kept)

    def _slots(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield (name in the state, this process's tensor, parameter it is sharded like)."""
        for i, (shard, p) in enumerate(zip(self.shards, self.parameters, strict=True)):
            slot = self.adam.state[shard]
            yield f"parameter.{i}", shard, p
            yield f"exp_avg.{i}", slot["exp_avg"], p
            yield f"exp_avg_sq.{i}", slot["exp_avg_sq"], p
            if self.average is not None:
                yield f"average.{i}", self.average[i], p
        for name, buffer in self.buffers.items():
            yield f"buffer.{name}", buffer, buffer

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and whole tensors, one after the other; all processes must iterate."""
        for name, rows, like in self._slots():
            yield name, whole(rows, like)

    def restore(self, state: dict[str, Tensor], step: int) -> None:
        """Continue from `state` after `step` steps."""
        for shard in self.shards:
            self.adam.state[shard] = {
                "step": torch.tensor(float(step), device=shard.device),
                "exp_avg": torch.zeros_like(shard),
                "exp_avg_sq": torch.zeros_like(shard),
            }
        with torch.no_grad():
            for name, rows, like in self._slots():
                rows.copy_(rows_of(state[name], like))


def _kept_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a checkpoint by name; a learner moves them, not gradients."""
    kept = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}
