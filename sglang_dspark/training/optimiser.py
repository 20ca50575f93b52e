"""AdamW or Muon with warm-up, cosine and clipping, and a moving average of the weights. All of it
works on the rows a process holds, so that one process and many share the code.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from sglang_dspark.errors import DSparkError
from sglang_dspark.families.learning.shards import local
from sglang_dspark.training.config import ScheduleConfig
from sglang_dspark.training.distributed import World, rows_of, whole

EMA_EVERY = 8
_NOT_DECAYED = ("norm", "bias", "embed", "markov_head")  # tables, gains: decay is for projections
_NOT_ORTHOGONAL = (*_NOT_DECAYED, "head")  # rows of tokens, not a map between activations
_MOMENTS = {torch.optim.AdamW: ("exp_avg", "exp_avg_sq"), torch.optim.Muon: ("momentum_buffer",)}


def learning_rate(step: int, s: ScheduleConfig) -> float:
    """Linear warm-up, then cosine to 2% of the peak at the last step."""
    if step < s.warmup_steps:
        return s.learning_rate * (step + 1) / s.warmup_steps
    done = (step - s.warmup_steps) / max(s.steps - s.warmup_steps, 1)
    return s.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


class Optimiser:
    """Updates the trainable parameters of a module, sharded already where it is to be sharded."""

    def __init__(self, module: nn.Module, schedule: ScheduleConfig, world: World):
        self.schedule, self.world = schedule, world
        named = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
        self.parameters = [p for _, p in named]
        self.shards = [local(p.detach()) for p in self.parameters]  # share the parameters' memory
        self.buffers = _kept_buffers(module)
        self.optimisers = self._optimisers([name for name, _ in named])
        self.average = [s.clone() for s in self.shards] if schedule.ema else None

    def _optimisers(self, names: Sequence[str]) -> list[torch.optim.Optimizer]:
        """AdamW, and Muon for the matrices if the schedule says so; each has what it is fit for.

        Raises DSparkError for Muon in several processes: it needs whole matrices.
        """
        s = self.schedule
        muon = s.optimizer == "muon"
        if muon and self.world.size > 1:
            raise DSparkError(
                f"schedule.optimizer muon needs whole matrices, {self.world.size} processes share "
                "them by rows: set adamw, or train in one process"
            )
        groups: dict[tuple[bool, bool], list[Tensor]] = {}
        for name, shard in zip(names, self.shards, strict=True):
            matrix = muon and shard.dim() == 2 and not any(w in name for w in _NOT_ORTHOGONAL)
            decayed = not any(word in name for word in _NOT_DECAYED)
            groups.setdefault((matrix, decayed), []).append(shard)
        found: list[torch.optim.Optimizer] = []
        for matrix in (False, True):
            chosen = [
                {"params": shards, "weight_decay": s.weight_decay * decayed}
                for (each, decayed), shards in groups.items()
                if each == matrix
            ]
            if chosen and matrix:  # updates as large as AdamW's, for one rate of both
                found.append(
                    torch.optim.Muon(chosen, lr=s.learning_rate, adjust_lr_fn="match_rms_adamw")
                )
            elif chosen:
                found.append(
                    torch.optim.AdamW(chosen, lr=s.learning_rate, betas=(0.9, 0.95), fused=True)
                )
        return found

    def step(self, number: int) -> None:
        """Clip the gradients, update with the rate of step `number`, follow with the average."""
        s = self.schedule
        grads = [
            torch.zeros_like(shard) if p.grad is None else local(p.grad)
            for p, shard in zip(self.parameters, self.shards, strict=True)
        ]
        squares = torch.stack([n.square() for n in torch._foreach_norm(grads)]).sum()
        # A replicated world would count a gradient once per process; shards are disjoint.
        norm = self.world.sum(squares).sqrt()
        torch._foreach_mul_(grads, torch.clamp(s.clip / (norm + 1e-6), max=1.0))
        for shard, grad in zip(self.shards, grads, strict=True):
            shard.grad = grad
        for each in self.optimisers:
            for group in each.param_groups:
                group["lr"] = learning_rate(number, s)
            each.step()
        for p in self.parameters:
            p.grad = None
        done = number + 1
        if self.average is not None and done % EMA_EVERY == 0:
            decay = min(s.ema, (1 + done) / (10 + done)) ** EMA_EVERY
            torch._foreach_lerp_(self.average, self.shards, 1 - decay)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within, the parameters hold their averages."""
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
        """(name in the state, this process's tensor, parameter it is sharded like)."""
        owners = {
            shard: each
            for each in self.optimisers
            for group in each.param_groups
            for shard in group["params"]
        }
        for i, (shard, p) in enumerate(zip(self.shards, self.parameters, strict=True)):
            yield f"parameter.{i}", shard, p
            for moment in _MOMENTS[type(owners[shard])]:
                yield f"{moment}.{i}", owners[shard].state[shard][moment], p
            if self.average is not None:
                yield f"average.{i}", self.average[i], p
        for name, buffer in self.buffers.items():
            yield f"buffer.{name}", buffer, buffer

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole tensor, one after the other; all processes must go through it."""
        for name, rows, like in self._slots():
            yield name, whole(rows, like)

    def restore(self, state: dict[str, Tensor], step: int) -> None:
        """Continue from `state` after `step` steps."""
        for each in self.optimisers:
            for shard in (shard for group in each.param_groups for shard in group["params"]):
                each.state[shard] = {k: torch.zeros_like(shard) for k in _MOMENTS[type(each)]}
                if isinstance(each, torch.optim.AdamW):
                    each.state[shard]["step"] = torch.tensor(float(step), device=shard.device)
        with torch.no_grad():
            for name, rows, like in self._slots():
                rows.copy_(rows_of(state[name], like))


def _kept_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that are part of a checkpoint, by name: moved by a learner, not by gradients."""
    kept = module.state_dict(keep_vars=True)
    return {name: buffer for name, buffer in module.named_buffers() if name in kept}
