"""Build the run of the stage `train`: `configs/train/gpu.yaml` with this machine's paths.

On a GPU the target is the demo's model. Its prompts are those of the parcel `prompts`
(`tools/gpu/pack --prompts FILE`); without it the model writes its own. Without a GPU a tiny target
(`models.py`) and made-up prompts replace them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from sglang_dspark.models.demo import ensure_demo_target
from sglang_dspark.models.source import GGUF_NAME
from sglang_dspark.shipped import shipped
from sglang_dspark.training.config import RunConfig, load_config
from tools.gpu.files import write_whole
from tools.gpu.kit.models import TINY, ready
from tools.gpu.packing.arrival import PROMPTS, has

LAYERS = "KIT_LAYERS"  # environment: draft layers of a run on the GPU
_TINY_DATA = {"rows": 16, "half_products": False, "max_prompt_tokens": 96, "max_new_tokens": 24}
_TINY_STEPS = {"sequences_per_step": 4, "anchors_per_sequence": 8, "held_out_every": 8}


def device_here() -> str:
    """Return `cuda` if there is a GPU, else `cpu`."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def run_config(home: Path, device: str) -> RunConfig:
    """Return the run in `home`, of the demo's model on `cuda`, of the tiny one on `cpu`.

    Steps are those of the file; the stage replaces them by its plan.
    """
    cfg = load_config(shipped("configs") / "train" / "gpu.yaml")
    folder = home / "training" / ("demo" if device == "cuda" else "tiny")
    steps: dict[str, Any] = {"device": device}
    if device == "cuda":
        layers = int(os.environ.get(LAYERS, cfg.drafter.layers))
        data = _demo_data(home, folder)
        shape: dict[str, Any] = {"layers": layers}
    else:
        layers = 1
        data = _tiny_data(home, folder, device)
        shape = {"layers": layers, "target_layer_ids": (1,)}
        steps |= _TINY_STEPS
    return cfg.model_copy(
        update={
            "run_dir": folder / f"{layers}-layers",
            "data": cfg.data.model_copy(update={**data, "store": folder / "answers"}),
            "drafter": cfg.drafter.model_copy(update=shape),
            "schedule": cfg.schedule.model_copy(update=steps),
        }
    )


def _demo_data(home: Path, folder: Path) -> dict[str, Any]:
    given = tuple(sorted((home / PROMPTS).glob("*.jsonl"))) if has(PROMPTS, home) else ()
    own = None if given else folder / "prompts.jsonl"
    return {"target": demo_target(home), "prompts": given, "self_prompts": own}


def _tiny_data(home: Path, folder: Path, device: str) -> dict[str, Any]:
    prompts = folder / "prompts.jsonl"
    if not prompts.is_file():
        write_whole(prompts, "".join(f"{json.dumps(row)}\n" for row in made_up_prompts()))
    target = ready(home, TINY, device) / "target"
    return {**_TINY_DATA, "target": target, "prompts": (prompts,)}


def demo_target(home: Path) -> Path:
    """Return the folder of the demo's model, built from its parcel or else this machine's."""
    if has("smollm", home):
        return ensure_demo_target(home / "cache", gguf=home / "smollm" / GGUF_NAME)
    return ensure_demo_target()


def made_up_prompts(count: int = 48) -> list[dict[str, str]]:
    """Make rows of a prompt file for a target whose answers ignore the prompt."""
    domains = ("math", "code", "chat")
    return [{"domain": domains[i % 3], "prompt": f"{i} {chr(97 + i % 26)}?"} for i in range(count)]
