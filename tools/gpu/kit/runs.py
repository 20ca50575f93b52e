"""What is trained in a call: target, prompts and one answered store for every kind of drafter.

With a GPU the demo's model answers; its prompts are those that came in the parcel `prompts`
(`tools/gpu/pack --prompts FILE`), else the model writes its own. Without one a tiny target
(`models.py`) answers a few. Kinds are those of `configs/train/compare`, and differ in nothing else.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.shipped import shipped
from sglang_dspark.training.collect import answer, plan_answers, write_self_prompts
from sglang_dspark.training.config import RunConfig, load_config
from tools.gpu.files import write_whole
from tools.gpu.kit.models import TINY, ready
from tools.gpu.packing.arrival import PROMPTS, has

KINDS = ("dspark", "eagle3", "dflash")
SELF_PROMPTS = 4000  # where none came
_DATA = {
    "cuda": {"rows": 512, "half_products": True, "max_prompt_tokens": 128, "max_new_tokens": 192},
    "cpu": {"rows": 16, "half_products": False, "max_prompt_tokens": 96, "max_new_tokens": 24},
}
_STEPS = {  # of training, beyond what configs/train/compare says
    "cuda": {"sequences_per_step": 32, "anchors_per_sequence": 32, "learning_rate": 1e-3},
    "cpu": {
        "sequences_per_step": 4,
        "anchors_per_sequence": 8,
        "half_products": False,
        "held_out_every": 8,
    },
}


def seconds_left() -> Callable[[], float]:
    """How long the stage may still take, from now on."""
    ends = time.monotonic() + float(os.environ.get("KIT_SECONDS", "120"))
    return lambda: ends - time.monotonic()


def device_here() -> str:
    """cuda where there is a GPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def run_config(kind: str, home: Path, device: str, *, tiny: bool) -> RunConfig:
    """A kind's run in `home`, of the demo's model or the tiny one; steps and times are the stage's
    business."""
    cfg = load_config(shipped("configs") / "train" / "compare" / f"{kind}.yaml")
    folder = home / "training" / ("tiny" if tiny else "demo")
    prompts = folder / "prompts.jsonl"
    if tiny:
        target, given = ready(home, TINY, device) / "target", (prompts,)
        if not prompts.is_file():
            write_whole(prompts, "".join(f"{json.dumps(row)}\n" for row in made_up_prompts()))
    else:
        from tools.gpu.kit.smollm import models

        target = models(home)[0]
        given = tuple(sorted((home / PROMPTS).glob("*.jsonl"))) if has(PROMPTS, home) else ()
    data = cfg.data.model_copy(
        update={
            **_DATA["cpu" if tiny else device],
            "target": target,
            "prompts": given,
            "self_prompts": None if given else prompts,
            "store": folder / "answers",
            "cache": False,
        }
    )
    drafter = cfg.drafter
    if tiny:
        drafter = drafter.model_copy(update={"layers": 1, "target_layer_ids": (1,)})
    steps = {**_STEPS["cpu" if tiny else device], "device": device, "threads": 2}
    return cfg.model_copy(
        update={
            "run_dir": folder / kind,
            "data": data,
            "drafter": drafter,
            "schedule": cfg.schedule.model_copy(update=steps),
        }
    )


def made_up_prompts(count: int = 48) -> list[dict[str, str]]:
    """Rows of a prompt file for a target that says the same whatever is asked."""
    domains = ("math", "code", "chat")
    return [{"domain": domains[i % 3], "prompt": f"{i} {chr(97 + i % 26)}?"} for i in range(count)]


def answer_prompts(cfg: RunConfig, device: str, seconds: float) -> dict[str, object]:
    """Answer what the store lacks, for so long at most; what came of it."""
    began = time.monotonic()
    target = TargetModel.load(cfg.data.target, half_products=cfg.data.half_products, device=device)
    own = cfg.data.self_prompts
    if own is not None and not own.is_file():
        write_self_prompts(cfg.data, target, SELF_PROMPTS, lambda done, total: None)
    skipped: list[str] = []
    plan = plan_answers(cfg, target.config, skipped.append)
    asked, started = len(plan.todo), time.monotonic()
    minutes = (seconds - (started - began)) / 60
    made = answer(plan, cfg.data, target, minutes, lambda done, total: None)
    taken = time.monotonic() - started
    kept = len(plan.writer.done)
    return {
        "prompts_by": "the target itself" if own is not None else "the parcel or a made-up file",
        "asked": asked,
        "answers": kept,
        "skipped": len(skipped),
        "tokens": made,
        "tokens_per_s": made / taken,
    }
