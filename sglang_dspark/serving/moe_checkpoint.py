"""Names and shapes of the tensors that a drafter with experts must have in its files.

They are those of the drafter itself, built without memory; quantised experts are codes with scales
beside them (quantisation/checkpoint.py). Pure: imports no sglang.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from sglang_dspark.drafter.checkpoint import stored_tensors
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.drafter.fields import reading_config
from sglang_dspark.drafter.model import DSparkDrafter
from sglang_dspark.quantisation.checkpoint import UNQUANTISED, expert_names, quantised_shapes


def moe_shapes(path: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Of the drafter that `path`/config.json describes; DSparkError where a field is wrong."""
    config = DrafterConfig.from_dir(path)
    with reading_config(path), torch.device("meta"):
        tensors = stored_tensors(DSparkDrafter(config), torch.float32)
    experts = set(expert_names(tensors))
    for name, tensor in tensors.items():
        shape = tuple(tensor.shape)
        if name in experts and config.expert_format != UNQUANTISED:
            yield from quantised_shapes(name, shape, config.expert_format)
        else:
            yield name, shape
