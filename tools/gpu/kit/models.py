"""The kit's models: a target of a real model's shape and its drafters (`models/simulated.py`).

A third of the tokens are doubtful: after them one draft in two is wrong, after the other tokens one
in twenty.

Each token of a target that attends (`ATTENDING`) depends on all KV rows before it, so that a wrong
row changes answers (`attending.py`).
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import torch

from sglang_dspark.models import simulated
from sglang_dspark.models.simulated import SHAPES, Acceptance, Shape

QWEN3_4B, TINY = SHAPES["qwen3-4b"], SHAPES["tiny"]
ATTENDING = {"cuda": SHAPES["qwen3-0.6b"], "cpu": TINY}  # shapes of the target that attends
# Chosen by measurement: nine of ten tokens are the table's; without the last KV row one token in
# six changes, without one row of a hundred one in twenty.
ATTENDS = 1.8
FAIR = Acceptance(doubtful=1 / 3, right=0.5, otherwise=0.95)


def ready(home: Path, shape: Shape, device: str, attends: float = 0.0) -> Path:
    """Return the folder of this shape's `target`, `dspark`, `mtp`, `follows.npy`; build if missing.

    Weights are bfloat16; a server on `cpu` computes with them in float32. attends: size of what
    attention adds (`simulated.write_models`), `ATTENDS` for a target that attends.
    """
    sources = Path(__file__).read_bytes() + Path(simulated.__file__).read_bytes()
    made_by = hashlib.sha256(sources + repr((shape, device, attends)).encode())
    folder = home / "models" / made_by.hexdigest()[:12]
    if not folder.is_dir():
        partial = folder.with_name(f".{folder.name}")
        shutil.rmtree(partial, ignore_errors=True)
        _make(partial, shape, device, attends)
        partial.rename(folder)
    return folder


def _make(folder: Path, shape: Shape, device: str, attends: float) -> None:
    simulated.write_models(folder, shape, FAIR, device, attends=attends)
    if device == "cuda":
        torch.cuda.empty_cache()  # return the memory to the servers
