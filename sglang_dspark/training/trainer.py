"""The training loop: AdamW, warm-up and cosine, clipping, moving average, exact resume."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_dspark.drafter.checkpoint import save_drafter
from sglang_dspark.drafter.model import DSparkDrafter
from sglang_dspark.errors import DSparkError
from sglang_dspark.training.batches import Batch, Sampler, make_batch
from sglang_dspark.training.config import RunConfig
from sglang_dspark.training.losses import LossParts, dspark_loss, position_weights

EMA_EVERY = 8


def learning_rate(step: int, cfg: RunConfig) -> float:
    """Linear warm-up, then cosine to 2% of the peak at the last step."""
    s = cfg.schedule
    if step < s.warmup_steps:
        return s.learning_rate * (step + 1) / s.warmup_steps
    done = (step - s.warmup_steps) / max(s.steps - s.warmup_steps, 1)
    return s.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(done, 1.0))))


class Trainer:
    """One process of training; `run` goes on from the last checkpoint in the run directory."""

    def __init__(self, cfg: RunConfig, drafter: DSparkDrafter, sampler: Sampler):
        self.cfg, self.drafter, self.sampler = cfg, drafter, sampler
        self.step = 0
        self.rank_is_reserved = drafter.draft_ids is not None
        self.column_of = _columns(drafter)
        self.parameters = [p for p in drafter.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=cfg.schedule.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=cfg.schedule.weight_decay,
            fused=True,
        )
        self.average = [p.detach().clone() for p in self.parameters]
        half = cfg.schedule.half_products
        self.head = drafter.head_weight.bfloat16() if half else drafter.head_weight

    def losses(self, batch: Batch) -> LossParts:
        """Forward pass over a batch; see `dspark_loss`."""
        drafter, gamma = self.drafter, self.cfg.drafter.gamma
        half = self.cfg.schedule.half_products
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            steps = torch.arange(batch.features.shape[1]).expand(batch.features.shape[:2])
            dtype = torch.bfloat16 if half else torch.float32
            context = drafter.context_kv(batch.features.to(dtype), steps)
            h = drafter.forward_blocks(batch.anchors, batch.positions, context, batch.positions)
            latent, embedded = self._sequential(batch, h)
            bias = drafter.markov_head.bias(latent, drafter.draft_ids)
            logits = torch.nn.functional.linear(h.to(self.head.dtype), self.head) + bias
            confidence = drafter.confidence(h, embedded)
        with torch.no_grad():
            target = torch.nn.functional.linear(batch.hidden.to(self.head.dtype), self.head)
        weight = position_weights(gamma) * batch.valid
        width = logits.shape[-1]
        return dspark_loss(
            logits.view(-1, width),
            target.view(-1, width),
            batch.log_partition.view(-1),
            self.column_of[batch.labels].view(-1),
            confidence.view(-1),
            weight.view(-1),
            self.cfg.objective,
        )

    def _sequential(self, batch: Batch, h: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of W2 and the embedded previous tokens, teacher-forced: [S, A, gamma, r] both."""
        head = self.drafter.markov_head
        rows = batch.anchors.numel()
        embedded = head.embed(batch.inputs)
        per_block, hidden = embedded.view(rows, h.shape[2], -1), h.view(rows, h.shape[2], -1)
        state, latents = head.start(rows), []
        for k in range(h.shape[2]):
            latent, state = head.latent(per_block[:, k], hidden[:, k], state)
            latents.append(latent)
        return torch.stack(latents, 1).view(embedded.shape), embedded

    def train_step(self) -> LossParts:
        """One optimiser step; raises DSparkError on a loss that is not finite."""
        s = self.cfg.schedule
        responses = list(self.sampler.responses(s.sequences_per_step))
        generator = self.sampler.generator
        batch = make_batch(responses, s.anchors_per_sequence, self.cfg.drafter.gamma, generator)
        parts = self.losses(batch)
        if not torch.isfinite(parts.total):
            raise DSparkError(
                f"loss is {parts.total.item()} at step {self.step}; the last checkpoint is kept, "
                "lower schedule.learning_rate and start again to go on from it"
            )
        self.optimizer.zero_grad(set_to_none=True)
        parts.total.backward()
        if self.rank_is_reserved:
            self._hold_reserved_rank()
        torch.nn.utils.clip_grad_norm_(self.parameters, s.clip)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.cfg)
        self.optimizer.step()
        self.step += 1
        if self.step % EMA_EVERY == 0:
            decay = min(s.ema, (1 + self.step) / (10 + self.step)) ** EMA_EVERY
            torch._foreach_lerp_(self.average, [p.data for p in self.parameters], 1 - decay)
        return parts

    def _hold_reserved_rank(self) -> None:
        """The last rank encodes the draft vocabulary and is not trained."""
        head = self.drafter.markov_head
        for weight in (head.markov_w1.weight, head.markov_w2.weight):
            assert weight.grad is not None
            weight.grad[:, -1] = 0

    def run(self, report: Callable[[int, dict[str, float]], None]) -> None:
        """Train to the configured number of steps, reporting running means and saving state."""
        s, gamma = self.cfg.schedule, self.cfg.drafter.gamma
        started, first = time.monotonic(), self.step
        seen: list[dict[str, float]] = []
        while self.step < s.steps:
            parts = self.train_step()
            accept = parts.accept.view(-1, gamma).mean(0)
            seen.append({"loss": parts.total.item(), "tau": 1 + accept.cumprod(0).sum().item()})
            if self.step % s.log_every == 0 or self.step == s.steps:
                means = {k: sum(r[k] for r in seen) / len(seen) for k in seen[0]}
                means["steps_per_s"] = (self.step - first) / (time.monotonic() - started)
                seen.clear()
                report(self.step, means)
            if self.step % s.checkpoint_every == 0 or self.step == s.steps:
                self.save()

    def save(self) -> None:
        """Write the resumable state and the averaged drafter."""
        run = self.cfg.run_dir
        run.mkdir(parents=True, exist_ok=True)
        state: dict[str, Tensor] = {f"sampler.{k}": v for k, v in self.sampler.state().items()}
        for i, p in enumerate(self.parameters):
            slot = self.optimizer.state[p]
            state[f"parameter.{i}"], state[f"average.{i}"] = p.detach(), self.average[i]
            state[f"exp_avg.{i}"], state[f"exp_avg_sq.{i}"] = slot["exp_avg"], slot["exp_avg_sq"]
        meta = {"step": str(self.step), "config": self.cfg.model_dump_json()}
        save_file(state, str(run / "state.safetensors.tmp"), meta)
        os.replace(run / "state.safetensors.tmp", run / "state.safetensors")
        self.export(run / "drafter")

    def export(self, path: Path) -> None:
        """Write the averaged weights as a checkpoint that engine and server load."""
        kept = [p.detach().clone() for p in self.parameters]
        with torch.no_grad():
            for p, a in zip(self.parameters, self.average, strict=True):
                p.copy_(a)
            save_drafter(self.drafter, path, torch.bfloat16)
            for p, k in zip(self.parameters, kept, strict=True):
                p.copy_(k)

    def resume(self) -> bool:
        """Continue from the run directory's state, if there is one for the same drafter."""
        file = self.cfg.run_dir / "state.safetensors"
        if not file.exists():
            return False
        meta = _metadata(file)
        then = json.loads(meta["config"])["drafter"]
        if then != json.loads(self.cfg.model_dump_json())["drafter"]:
            raise DSparkError(f"{file} belongs to a drafter of another shape; choose a new run_dir")
        state = load_file(str(file))
        self.step = int(meta["step"])
        with torch.no_grad():
            for i, p in enumerate(self.parameters):
                p.copy_(state[f"parameter.{i}"])
                self.average[i].copy_(state[f"average.{i}"])
                self.optimizer.state[p] = {
                    "step": torch.tensor(float(self.step)),
                    "exp_avg": state[f"exp_avg.{i}"].clone(),
                    "exp_avg_sq": state[f"exp_avg_sq.{i}"].clone(),
                }
        self.sampler.restore({k: state[f"sampler.{k}"] for k in ("order", "generator")})
        return True


def _columns(drafter: DSparkDrafter) -> Tensor:
    """Token id -> column of the draft logits, -1 outside the draft vocabulary: [V]."""
    size = drafter.config.vocab_size
    if drafter.draft_ids is None:
        return torch.arange(size)
    columns = torch.full((size,), -1)
    columns[drafter.draft_ids] = torch.arange(len(drafter.draft_ids))
    return columns


def _metadata(file: Path) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(str(file), framework="pt") as handle:
        return dict(handle.metadata())
