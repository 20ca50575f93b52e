"""Train a DSpark drafter on the device for as long as the call lasts: the stage `train`.

A plain server answers prompts first (`answers.py`), for two minutes at most; the rest of the time
is training. The first steps are timed with torch.compile and without, and the faster way is kept.
The planned steps fill the time left, or $KIT_TRAIN_SECONDS, which may span several calls. If the
time is up earlier, the next call resumes exactly from the trainer's state. Products are bfloat16 on
a GPU; $KIT_LAYERS sets the draft layers. The drafter is returned in files below 16 MiB, which
tools/gpu/join joins. Without a GPU a tiny target's drafter is trained for a few steps.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import nn

from sglang_dspark.drafter.attention import RMSNorm
from sglang_dspark.drafter.backbone import MLP
from sglang_dspark.errors import DSparkError
from sglang_dspark.training.config import RunConfig
from sglang_dspark.training.distributed import World
from sglang_dspark.training.setup import prepare
from sglang_dspark.training.store import read_index
from sglang_dspark.training.trainer import Trainer
from tools.gpu.files import write_whole
from tools.gpu.kit.answers import answered
from tools.gpu.kit.carry import send
from tools.gpu.kit.device import device_name, say, seconds_left
from tools.gpu.kit.runs import device_here, run_config
from tools.gpu.kit.stages import GOES_ON
from tools.gpu.packing.arrival import kit_home

PROBE = 24  # steps timed with and without torch.compile; the first third warms up
GAIN = 0.97  # a compiled step must take less than this share of an eager one
NAME = "drafter"
READY_S = 250.0  # a plain server's first start on a machine, at most
ANSWERS_S = 120.0
LEAST_TRAINING_S = 60.0
MOST_PIECES = 5  # of eight files: manifest, the stage's rows and the call's log are returned too
_READY_SHARE, _ANSWERS_SHARE = 0.4, 0.4
_ENDING_S = 30.0  # to save, measure and split the drafter
_SHARE = 0.9  # share of the time that planned steps fill
_STATE_S = 60.0  # between saved states
_MOST_STEPS = {"cuda": 60_000, "cpu": 60}


@dataclass(frozen=True)
class Course:
    """The plan of the first call. compiled: use torch.compile for parts of the drafter. step_s: the
    measured seconds of a step, compiled or not."""

    steps: int
    compiled: bool
    step_s: float
    eager_s: float
    compiled_s: float


@dataclass(frozen=True)
class Budget:
    """Most seconds until the server is ready, for prompts and answers, and for training.

    Training also gets the time that the first two do not use.
    """

    ready_s: float
    answers_s: float
    training_s: float


class TimeUpError(Exception):
    """The call ends; the trainer's state is saved."""


def main() -> int:
    left, device = seconds_left(), device_here()
    cfg = run_config(kit_home(), device)
    say(device=device_name(), measured=device == "cuda", layers=cfg.drafter.layers)
    try:
        if not read_index(cfg.data.store):
            budget = budget_of(left())
            say(budget=asdict(budget))
            logs = kit_home() / "logs"
            say(answers=answered(cfg, device, logs, budget.ready_s, budget.answers_s))
        return trained(cfg, device, left)
    except DSparkError as error:
        print(f"train: {error}", file=sys.stderr)
        return 1


def budget_of(seconds: float) -> Budget:
    """Divide a call's seconds after reserving those for its end.

    Answers get at most two minutes and two fifths of the time after the server's start. Raises
    DSparkError if too little is left to train.
    """
    usable = seconds - _ENDING_S
    ready_s = min(READY_S, _READY_SHARE * usable)
    answers_s = min(ANSWERS_S, _ANSWERS_SHARE * (usable - ready_s))
    training_s = usable - ready_s - answers_s
    if training_s < LEAST_TRAINING_S:
        raise DSparkError(
            f"{seconds:.0f} s leave {max(0.0, training_s):.0f} to train, not "
            f"{LEAST_TRAINING_S:.0f}; give the call more: tools/gpu/run --seconds"
        )
    return Budget(ready_s, answers_s, training_s)


def trained(cfg: RunConfig, device: str, left: Callable[[], float]) -> int:
    """Plan or resume the run, train, send the drafter; return the stage's status.

    Raises DSparkError if the drafter has too many pieces."""
    file = cfg.run_dir / "course.json"
    if file.is_file():
        course = Course(**json.loads(file.read_text()))
    else:
        shutil.rmtree(cfg.run_dir, ignore_errors=True)
        course = planned(cfg, device, left() - _ENDING_S)
        write_whole(file, json.dumps(asdict(course)))
    say(course=asdict(course))
    ended = train(timed(cfg, course), course.compiled, lambda: left() > _ENDING_S)
    files = send(NAME, cfg.run_dir / "drafter", Path(os.environ["KIT_FILES"]))
    say(files=files)
    if len(files) > MOST_PIECES:
        raise DSparkError(f"the drafter has {len(files)} pieces, {MOST_PIECES} come back")
    return 0 if ended else GOES_ON


def planned(cfg: RunConfig, device: str, seconds: float) -> Course:
    """Time the run's first steps with and without torch.compile, and plan the remaining ones.

    They count as steps of the run. They are within the warm-up, where the learning rate does not
    depend on the number of steps.
    """
    began = time.monotonic()
    probing = cfg.schedule.model_copy(
        update={"steps": 2 * PROBE, "warmup_steps": max(2 * PROBE, cfg.schedule.warmup_steps)}
    )
    trainer, note = prepare(cfg.model_copy(update={"schedule": probing}), world=World.join(device))
    say(note=note)
    eager_s = step_seconds(trainer)
    compile_parts(trainer.learner.module, device)
    compiled_s = step_seconds(trainer)
    trainer.save()
    room = float(os.environ.get("KIT_TRAIN_SECONDS", seconds)) - (time.monotonic() - began)
    compiled = compiled_s < GAIN * eager_s
    step_s = compiled_s if compiled else eager_s
    steps = 2 * PROBE + max(1, int(_SHARE * room / step_s))
    return Course(min(steps, _MOST_STEPS[device]), compiled, step_s, eager_s, compiled_s)


def step_seconds(trainer: Trainer) -> float:
    """Measure the median seconds of PROBE training steps without the first third."""
    taken = []
    for _ in range(PROBE):
        began = time.monotonic()
        trainer.train_step()
        if trainer.world.device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.monotonic() - began)
    return median(taken[PROBE // 3 :])


def compile_parts(module: nn.Module, device: str) -> None:
    """Compile norms and MLPs by torch.compile, in place.

    Eagerly they are many small kernels, of shapes that change with every step. Without a GPU they
    are only traced, because compiling would take a minute."""
    torch._dynamo.config.recompile_limit = 64  # modules of a class share code, not shapes
    for part in module.modules():
        if isinstance(part, RMSNorm | MLP):
            part.compile(dynamic=True, backend="inductor" if device == "cuda" else "eager")


def timed(cfg: RunConfig, course: Course) -> RunConfig:
    """Set the run's steps and intervals: a saved state a minute, some logs and validations."""
    every = max(1, min(int(_STATE_S / course.step_s), course.steps // 2))
    steps = {
        "steps": course.steps,
        "warmup_steps": max(2 * PROBE, cfg.schedule.warmup_steps),
        "checkpoint_every": every,
        "log_every": max(1, min(every // 4, 100)),
        "validate_every": max(1, course.steps // 8),
    }
    return cfg.model_copy(update={"schedule": cfg.schedule.model_copy(update=steps)})


def train(cfg: RunConfig, compiled: bool, may_go_on: Callable[[], bool]) -> bool:
    """Train from the run's saved state; return whether all steps are done."""
    trainer, note = prepare(cfg, world=World.join(cfg.schedule.device))
    say(note=note)
    if compiled:
        compile_parts(trainer.learner.module, cfg.schedule.device)

    def report(step: int, means: dict[str, float]) -> None:
        say(row={"step": step, **means})
        if step < cfg.schedule.steps and not may_go_on():
            trainer.save()
            raise TimeUpError

    try:
        trainer.run(report)
    except TimeUpError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
