"""Read and write MTP checkpoints in the format that SGLang serves as EAGLE."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from sglang_dspark.common.atomic_write import replacing
from sglang_dspark.drafter.checkpoint import (
    built,
    check_weights,
    fill_parameters,
    write_checkpoint,
)
from sglang_dspark.drafter.reduced_vocabulary import token_ids
from sglang_dspark.drafter.target_fit import Target, require_sizes, target_with
from sglang_dspark.drafter.weight_files import stored_tensors
from sglang_dspark.families.mtp.model import MTPConfig, MTPDrafter
from sglang_dspark.families.vocabulary import stored_draft_ids, to_d2t

TOKEN_MAP = "token_map.pt"


def _stored(name: str) -> str:
    """Name in the file: the layer's modules stand below `layers.0`."""
    return name if name.startswith("fc.") else f"layers.0.{name}"


def mtp_tensors(drafter: MTPDrafter) -> dict[str, Tensor]:
    """Return a drafter's tensors by their names in a file."""
    tensors = {_stored(name): tensor for name, tensor in drafter.state_dict().items()}
    if drafter.draft_ids is not None:
        tensors["d2t"] = to_d2t(drafter.draft_ids)
    return tensors


def save_mtp(drafter: MTPDrafter, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write what SGLang serves as EAGLE.

    With a reduced draft vocabulary, `token_map.pt` beside it is for `--speculative-token-map`
    (SGLang reads no other format there); without that option SGLang drafts over all tokens.
    """
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in mtp_tensors(drafter).items()
    }
    write_checkpoint(path, tensors, drafter.config.to_json())
    if drafter.draft_ids is not None:
        with replacing(Path(path) / TOKEN_MAP, alone=True) as temporary:
            torch.save(drafter.draft_ids.tolist(), temporary)


def mtp_of(config: MTPConfig, tensors: Mapping[str, Tensor]) -> MTPDrafter:
    """Return the drafter of a checked checkpoint's tensors, not attached to a target.

    tensors: by their names in the file without prefixes (`bare_name`).
    """
    ids = (
        token_ids(tensors["d2t"].long().flatten(), config.vocab_size) if "d2t" in tensors else None
    )
    drafter = MTPDrafter(config, ids)
    fill_parameters(drafter, tensors, _stored)
    return drafter.eval()


def check_mtp(path: Path, target: Target, *, weights: bool = True) -> MTPConfig:
    """Read the config of a drafter for `target`, and check its files without their values.

    weights: False where they are not here yet. Raises DSparkError as `load_mtp`.
    """
    config = MTPConfig.from_dir(path)
    require_sizes(path, config.hidden_size, config.vocab_size, target)
    if not weights:
        return config
    stored = stored_tensors(path)
    ids = stored_draft_ids(stored, config.vocab_size, path, config.draft_vocab_size)
    check_weights(lambda: MTPDrafter(config, ids), stored, _stored, path)
    return config


def load_mtp(
    path: Path, embed_tokens: Tensor, lm_head: Tensor, num_layers: int | None = None
) -> MTPDrafter:
    """Load in float32 and attach to the target's embedding and LM head [V, d].

    num_layers: of the target; not checked. Raises DSparkError for a missing, damaged or foreign
    checkpoint and for another target.
    """
    config = MTPConfig.from_dir(path)
    require_sizes(path, config.hidden_size, config.vocab_size, target_with(embed_tokens))
    stored = stored_tensors(path)
    ids = stored_draft_ids(stored, config.vocab_size, path, config.draft_vocab_size)
    drafter = built(lambda: MTPDrafter(config, ids), stored, _stored, path)
    drafter.attach(embed_tokens, lm_head)
    return drafter.eval()
