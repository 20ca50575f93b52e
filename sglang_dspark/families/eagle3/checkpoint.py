"""Read and write Eagle3 checkpoints in the format that SGLang serves as EAGLE3."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from sglang_dspark.drafter.checkpoint import write_checkpoint
from sglang_dspark.drafter.target_fit import Target, require_sizes, target_with
from sglang_dspark.drafter.weight_files import Stored, bare_name, stored_tensors
from sglang_dspark.families.chain.checkpoint import (
    check_stored,
    drafter_of,
    read_drafter,
    rounded,
    tensors_of,
)
from sglang_dspark.families.eagle3.model import Eagle3Config, Eagle3Drafter
from sglang_dspark.families.vocabulary import to_t2d

_ONE_LAYER, _MIDLAYER = "layers.0.", "midlayer."  # two names of the layer in files
_LAYER = ("self_attn.", "mlp.", "input_layernorm.", "hidden_norm.", "post_attention_layernorm.")


def _stored(name: str) -> str:
    """Return the name in the file, where the layer's modules are below `midlayer`."""
    return f"{_MIDLAYER}{name}" if name.startswith(_LAYER) else name


def eagle3_tensors(drafter: Eagle3Drafter) -> dict[str, Tensor]:
    """Return a drafter's tensors by their names in a file."""
    return tensors_of(drafter, _stored)


def save_eagle3(drafter: Eagle3Drafter, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a checkpoint that SGLang serves as EAGLE3."""
    tensors = rounded(eagle3_tensors(drafter), dtype)
    if drafter.draft_ids is not None:
        tensors["t2d"] = to_t2d(drafter.draft_ids, drafter.config.vocab_size)
    write_checkpoint(path, tensors, drafter.config.to_json())


def eagle3_of(config: Eagle3Config, tensors: Mapping[str, Tensor]) -> Eagle3Drafter:
    """Return the drafter of a checked checkpoint's tensors, not attached to a target.

    tensors: by their names in the file without prefixes (`bare_name`).
    """
    given = {name.replace(_ONE_LAYER, _MIDLAYER): tensor for name, tensor in tensors.items()}
    return drafter_of(Eagle3Drafter, config, given, _stored)


def check_eagle3(path: Path, target: Target, *, weights: bool = True) -> Eagle3Config:
    """Read the config of a drafter for `target`, and check its files without their values.

    weights: False if they are not downloaded yet. Raises DSparkError as `load_eagle3`.
    """
    config = _fitting(path, target)
    if weights:
        check_stored(Eagle3Drafter, config, _stored_tensors(path), _stored, path)
    return config


def load_eagle3(
    path: Path, embed_tokens: Tensor, lm_head: Tensor, num_layers: int | None = None
) -> Eagle3Drafter:
    """Load in float32 and attach to the target's embedding and LM head [V, d].

    num_layers: of the target, for a config.json that names no layers. Raises DSparkError for a
    missing, damaged or foreign checkpoint and for another target.
    """
    config = _fitting(path, target_with(embed_tokens), num_layers)
    drafter = read_drafter(Eagle3Drafter, config, _stored_tensors(path), _stored, path)
    drafter.attach(embed_tokens, lm_head)
    return drafter


def _fitting(path: Path, target: Target, num_layers: int | None = None) -> Eagle3Config:
    """Read a config that has the target's sizes."""
    config = Eagle3Config.from_dir(path, target.num_layers if num_layers is None else num_layers)
    require_sizes(path, config.hidden_size, config.vocab_size, target)
    return config


def _stored_tensors(path: Path) -> Stored:
    return stored_tensors(path, lambda name: bare_name(name).replace(_ONE_LAYER, _MIDLAYER))
