"""Read and write Eagle3 checkpoints in the format that SGLang serves as EAGLE3."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from sglang_dspark.drafter.checkpoint import (
    built,
    check_weights,
    fill_parameters,
    write_checkpoint,
)
from sglang_dspark.drafter.reduced_vocabulary import token_ids
from sglang_dspark.drafter.target_fit import Target, require_sizes, target_with
from sglang_dspark.drafter.weight_files import Stored, bare_name, stored_tensors
from sglang_dspark.families.eagle3.model import Eagle3Config, Eagle3Drafter
from sglang_dspark.families.vocabulary import stored_draft_ids, to_d2t, to_t2d

_ONE_LAYER, _MIDLAYER = "layers.0.", "midlayer."  # two names of the layer in files
_LAYER = ("self_attn.", "mlp.", "input_layernorm.", "hidden_norm.", "post_attention_layernorm.")


def _stored(name: str) -> str:
    """Name in the file: the layer's modules stand below `midlayer`."""
    return f"{_MIDLAYER}{name}" if name.startswith(_LAYER) else name


def eagle3_tensors(drafter: Eagle3Drafter) -> dict[str, Tensor]:
    """Return a drafter's tensors by their names in a file."""
    tensors = {_stored(name): tensor for name, tensor in drafter.state_dict().items()}
    if drafter.draft_ids is not None:
        tensors["d2t"] = to_d2t(drafter.draft_ids)
    return tensors


def save_eagle3(drafter: Eagle3Drafter, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write what SGLang serves as EAGLE3."""
    tensors = {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in eagle3_tensors(drafter).items()
    }
    if drafter.draft_ids is not None:
        tensors["t2d"] = to_t2d(drafter.draft_ids, drafter.config.vocab_size)
    write_checkpoint(path, tensors, drafter.config.to_json())


def eagle3_of(config: Eagle3Config, tensors: Mapping[str, Tensor]) -> Eagle3Drafter:
    """Return the drafter of a checked checkpoint's tensors, not attached to a target.

    tensors: by their names in the file without prefixes (`bare_name`).
    """
    given = {name.replace(_ONE_LAYER, _MIDLAYER): tensor for name, tensor in tensors.items()}
    ids = token_ids(given["d2t"].long().flatten(), config.vocab_size) if "d2t" in given else None
    drafter = Eagle3Drafter(config, ids)
    fill_parameters(drafter, given, _stored)
    return drafter.eval()


def check_eagle3(path: Path, target: Target, *, weights: bool = True) -> Eagle3Config:
    """Read the config of a drafter for `target`, and check its files without their values.

    weights: False where they are not here yet. Raises DSparkError as `load_eagle3`.
    """
    config = Eagle3Config.from_dir(path, target.num_layers)
    require_sizes(path, config.hidden_size, config.vocab_size, target)
    if not weights:
        return config
    stored = _stored_tensors(path)
    ids = stored_draft_ids(stored, config.vocab_size, path, config.draft_vocab_size)
    check_weights(lambda: Eagle3Drafter(config, ids), stored, _stored, path)
    return config


def load_eagle3(
    path: Path, embed_tokens: Tensor, lm_head: Tensor, num_layers: int | None = None
) -> Eagle3Drafter:
    """Load in float32 and attach to the target's embedding and LM head [V, d].

    num_layers: of the target, for a config.json that names no layers. Raises DSparkError for a
    missing, damaged or foreign checkpoint and for another target.
    """
    config = Eagle3Config.from_dir(path, num_layers)
    require_sizes(path, config.hidden_size, config.vocab_size, target_with(embed_tokens))
    stored = _stored_tensors(path)
    ids = stored_draft_ids(stored, config.vocab_size, path, config.draft_vocab_size)
    drafter = built(lambda: Eagle3Drafter(config, ids), stored, _stored, path)
    drafter.attach(embed_tokens, lm_head)
    return drafter.eval()


def _stored_tensors(path: Path) -> Stored:
    return stored_tensors(path, lambda name: bare_name(name).replace(_ONE_LAYER, _MIDLAYER))
