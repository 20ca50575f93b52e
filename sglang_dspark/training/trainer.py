"""Train every kind of drafter, in one process or many: draw, pack, losses, update.

The loop also measures on held-out sequences and resumes exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from sglang_dspark.errors import DSparkError
from sglang_dspark.families.learning.batch import PackedBatch
from sglang_dspark.families.learning.learner import Learner
from sglang_dspark.families.learning.losses import LossParts
from sglang_dspark.training.config import RunConfig
from sglang_dspark.training.distributed import World, gathered
from sglang_dspark.training.files import disk_error
from sglang_dspark.training.metrics import (
    SUMS,
    block_sums,
    expected_calibration_error,
    loss_and_tau,
    survival_sums,
)
from sglang_dspark.training.optimiser import Optimiser, learning_rate
from sglang_dspark.training.sampler import Draw, Sampler
from sglang_dspark.training.state import check_state, load_state, save_state
from sglang_dspark.training.states import StateSource

Report = Callable[[int, dict[str, float]], None]


class _Step(nn.Module):
    """The learner's forward pass as a module, so that FSDP gathers the parameters."""

    def __init__(self, learner: Learner):
        super().__init__()
        self.module = learner.module
        self._losses = learner.losses

    def forward(self, batch: PackedBatch) -> tuple[Tensor | None, ...]:
        p = self._losses(batch)
        return p.total, p.weight, p.accept, p.nll, p.terms, p.confidence


class Trainer:
    """The training loop; `run` continues from the last checkpoint, if `resume` found one.

    half: products in bfloat16. held_out: draws to measure on, never trained on.
    """

    def __init__(
        self,
        cfg: RunConfig,
        learner: Learner,
        sampler: Sampler,
        source: StateSource,
        *,
        world: World | None = None,
        half: bool = False,
        held_out: Sequence[Draw] = (),
    ):
        self.cfg, self.learner, self.sampler, self.source = cfg, learner, sampler, source
        self.world, self.half = world or World(), half
        self.held_out = held_out if len(held_out) >= self.world.size else ()
        if cfg.schedule.sequences_per_step < self.world.size:
            raise DSparkError(
                f"schedule.sequences_per_step {cfg.schedule.sequences_per_step} is less than the "
                f"{self.world.size} processes that share them; raise it"
            )
        self._forward = _Step(learner)
        self.world.shard(self._forward)
        self.optimiser = Optimiser(learner.module, cfg.schedule, self.world)
        self.step = 0

    def losses(self, draws: Sequence[Draw]) -> tuple[LossParts, Tensor]:
        """Return the losses of this process's share of the draws, and their validity [P, gamma]."""
        mine = draws[self.world.rank :: self.world.size]
        batch = self.source.batch(mine, self.learner.gamma).to(self.world.device)
        with torch.autocast(self.world.device.type, torch.bfloat16, enabled=self.half):
            return LossParts(*self._forward(batch)), batch.valid

    def train_step(self) -> Tensor:
        """Run one optimiser step; return the sums of `block_sums` over all processes.

        Raises DSparkError on a loss that is not finite, before the weights change.
        """
        s = self.cfg.schedule
        parts, valid = self.losses(self.sampler.draw(s.sequences_per_step, s.anchors_per_sequence))
        sums = self.world.sum(block_sums(parts, valid))
        if not torch.isfinite(sums[0]):
            raise DSparkError(
                f"the loss is not finite at step {self.step + 1}; the last checkpoint is kept: "
                "lower schedule.learning_rate and start again to go on from it"
            )
        # A process's loss is a mean over its own weight and FSDP averages gradients, but the step
        # uses the mean over all weight.
        share = parts.weight.double() * self.world.size / sums[1]
        (parts.total * share.float()).backward()
        self.learner.after_backward()
        self.optimiser.step(self.step)
        self.step += 1
        return sums

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Return loss, tau and calibration error of the averaged weights on held-out draws."""
        if not self.held_out:
            return {}
        device, per = self.world.device, self.cfg.schedule.sequences_per_step
        sums = torch.zeros(SUMS, dtype=torch.float64, device=device)
        bins: Tensor | float = 0.0
        with self.optimiser.averaged():
            for start in range(0, len(self.held_out), per):
                draws = self.held_out[start : start + per]
                if len(draws) < self.world.size:
                    break  # every process needs a sequence
                parts, valid = self.losses(draws)
                sums += block_sums(parts, valid)
                bins = bins + survival_sums(parts, valid)
            self.world.release(self._forward)
        sums = self.world.sum(sums)
        assert isinstance(bins, Tensor)
        means = {f"held_out_{k}": v for k, v in loss_and_tau(sums).items()}
        if parts.confidence is not None:
            positions = float(sums[3]) * self.learner.gamma
            means["held_out_ece"] = expected_calibration_error(self.world.sum(bins), positions)
        return means

    def run(self, report: Report) -> None:
        """Train to the configured number of steps, reporting running means and saving state."""
        s = self.cfg.schedule
        if self.step >= s.steps:
            self.export()  # a run may have been stopped after its last state
        since, first, seen = time.monotonic(), self.step, []
        reported = since
        while self.step < s.steps:
            seen.append(self.train_step())
            last = self.step == s.steps
            measured = self.step % s.validate_every == 0 or last
            if self.step % s.log_every == 0 or measured:
                sums, now = torch.stack(seen).sum(0), time.monotonic()
                means = loss_and_tau(sums)
                means["steps_per_s"] = (self.step - first) / (now - since)
                means["tokens_per_s"] = float(sums[-1]) / (now - reported)
                means["learning_rate"] = learning_rate(self.step - 1, s)
                seen.clear()
                if measured:
                    means |= self.validate()
                report(self.step, means)
                reported = time.monotonic()
            if self.step % s.checkpoint_every == 0 or last:
                self.save()

    def save(self) -> None:
        """Write the resumable state and the averaged drafter; all processes must call it."""
        save_state(self.cfg, self.step, self.optimiser, self.sampler, self.world)
        self.export()

    def export(self) -> None:
        """Write the averaged drafter; all processes must call it."""
        path = self.cfg.run_dir / "drafter"
        with self.optimiser.averaged(), gathered(self.learner.module):
            try:
                if self.world.leads:
                    self.learner.export(path)
            except (OSError, SafetensorError) as error:
                raise disk_error(path, error) from None
        self.world.wait()

    def resume(self) -> bool:
        """Continue from the run directory's state, if there is one for the same drafter."""
        step = check_state(self.cfg, self.sampler.reader)
        if step is None:
            return False
        load_state(self.cfg, step, self.optimiser, self.sampler)
        self.step = step
        return True
