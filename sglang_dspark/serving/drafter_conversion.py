"""Write a drafter in the layout that SGLang's DSPARK reads, after the checks of a server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path

import torch
from torch import Tensor

from sglang_dspark.drafter.checkpoint import (
    check_drafter,
    fill_parameters,
    save_drafter,
    stored_name,
)
from sglang_dspark.drafter.model import DSparkDrafter
from sglang_dspark.drafter.target_fit import Target
from sglang_dspark.serving.checkpoint import require_served


def convert_drafter(source: Path, out: Path, target: Target) -> None:
    """Write the drafter in `source` into `out`, in the widest of its weights' types up to float32.

    target: what it is to draft for. Nothing is written for a drafter that a server would refuse;
    quantised experts are written restored.
    Raises DSparkError for such a drafter, and when `out` cannot be written.
    """
    files = check_drafter(source, target)
    require_served(files, target)
    layers = files.config.num_target_layers if target.num_layers is None else target.num_layers
    drafter = DSparkDrafter(replace(files.config, num_target_layers=layers))
    tensors = files.load()
    fill_parameters(drafter, tensors, stored_name)
    save_drafter(drafter, out, _common_dtype(tensors))


def _common_dtype(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """The type that holds every weight; the routers' biases are float32 in any file.

    In a narrower one a finite value could become infinite.
    """
    kinds = [t.dtype for name, t in tensors.items() if not name.endswith("e_score_correction_bias")]
    return min(reduce(torch.promote_types, kinds), torch.float32, key=lambda kind: kind.itemsize)
