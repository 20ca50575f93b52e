"""Read and write MTP checkpoints in the format that SGLang serves as EAGLE."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from sglang_dspark.common.atomic_write import replacing
from sglang_dspark.drafter.checkpoint import write_checkpoint
from sglang_dspark.drafter.target_fit import Target, require_sizes, target_with
from sglang_dspark.drafter.weight_files import stored_tensors
from sglang_dspark.families.chain.checkpoint import (
    check_stored,
    drafter_of,
    read_drafter,
    rounded,
    tensors_of,
)
from sglang_dspark.families.mtp.model import MTPConfig, MTPDrafter

TOKEN_MAP = "token_map.pt"


def _stored(name: str) -> str:
    """Return the name in the file, where the layer's modules are below `layers.0`."""
    return name if name.startswith("fc.") else f"layers.0.{name}"


def mtp_tensors(drafter: MTPDrafter) -> dict[str, Tensor]:
    """Return a drafter's tensors by their names in a file."""
    return tensors_of(drafter, _stored)


def save_mtp(drafter: MTPDrafter, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a checkpoint that SGLang serves as EAGLE.

    With a reduced draft vocabulary, `token_map.pt` in the same directory is for
    `--speculative-token-map` (SGLang reads no other format there). Without that option SGLang
    drafts over all tokens.
    """
    write_checkpoint(path, rounded(mtp_tensors(drafter), dtype), drafter.config.to_json())
    if drafter.draft_ids is not None:
        with replacing(Path(path) / TOKEN_MAP, alone=True) as temporary:
            torch.save(drafter.draft_ids.tolist(), temporary)


def mtp_of(config: MTPConfig, tensors: Mapping[str, Tensor]) -> MTPDrafter:
    """Return the drafter of a checked checkpoint's tensors, not attached to a target.

    tensors: by their names in the file without prefixes (`bare_name`).
    """
    return drafter_of(MTPDrafter, config, tensors, _stored)


def check_mtp(path: Path, target: Target, *, weights: bool = True) -> MTPConfig:
    """Read the config of a drafter for `target`, and check its files without their values.

    weights: False if they are not downloaded yet. Raises DSparkError as `load_mtp`.
    """
    config = _fitting(path, target)
    if weights:
        check_stored(MTPDrafter, config, stored_tensors(path), _stored, path)
    return config


def load_mtp(
    path: Path, embed_tokens: Tensor, lm_head: Tensor, num_layers: int | None = None
) -> MTPDrafter:
    """Load in float32 and attach to the target's embedding and LM head [V, d].

    num_layers: of the target; not checked. Raises DSparkError for a missing, damaged or foreign
    checkpoint and for another target.
    """
    config = _fitting(path, target_with(embed_tokens))
    drafter = read_drafter(MTPDrafter, config, stored_tensors(path), _stored, path)
    drafter.attach(embed_tokens, lm_head)
    return drafter


def _fitting(path: Path, target: Target) -> MTPConfig:
    """Read a config that has the target's sizes."""
    config = MTPConfig.from_dir(path)
    require_sizes(path, config.hidden_size, config.vocab_size, target)
    return config
