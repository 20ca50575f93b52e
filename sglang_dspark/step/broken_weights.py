"""Refuses a drafter whose weights hold values that are no numbers, before it serves.

Such a drafter costs speed and no correctness: what it drafts is not a number, and is rejected. But
nothing would say so: upstream loads all that the file holds.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sglang_dspark.drafter.weight_files import is_finite
from sglang_dspark.serving import startup

_CHECKED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # not packed formats


def refuse_broken(worker: Any) -> None:
    """End the server in one line if the drafter of upstream's worker has such a weight."""
    found = broken_weight(worker.draft_model, worker.target_worker.model_runner.model)
    if found is not None:
        path = worker.draft_model_runner.model_config.model_path
        startup.stop(
            f"drafter {path}: the weight {found} holds values that are no finite numbers; export "
            "or fetch the drafter again, or with --dtype float16 try --dtype float32"
        )


def broken_weight(drafter: nn.Module, target: nn.Module) -> str | None:
    """Name of the drafter's first weight that is not finite throughout; None: all are.

    Weights that it shares with the target are the target's business.
    """
    shared = {weight.data_ptr() for weight in target.parameters()}
    for name, weight in drafter.named_parameters():
        own = weight.dtype in _CHECKED and weight.data_ptr() not in shared
        if own and not is_finite(weight.detach()):
            return name
    return None
