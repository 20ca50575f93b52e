"""Read, check and collect the tensors of Eagle3 and MTP checkpoints: the part both share.

name_in_file: a parameter's name -> its name in the file, without prefixes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from sglang_dspark.drafter.checkpoint import built, check_weights, fill_parameters
from sglang_dspark.drafter.reduced_vocabulary import token_ids
from sglang_dspark.drafter.weight_files import Stored
from sglang_dspark.families.chain.model import ChainDrafter
from sglang_dspark.families.vocabulary import stored_draft_ids, to_d2t

Drafter = TypeVar("Drafter", bound=ChainDrafter)
Make = Callable[[Any, Tensor | None], Drafter]  # of a config and draft ids
Names = Callable[[str], str]


def tensors_of(drafter: ChainDrafter, name_in_file: Names) -> dict[str, Tensor]:
    """Return a drafter's tensors, `d2t` among them, by their names in a file."""
    tensors = {name_in_file(name): tensor for name, tensor in drafter.state_dict().items()}
    if drafter.draft_ids is not None:
        tensors["d2t"] = to_d2t(drafter.draft_ids)
    return tensors


def rounded(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors with floating-point values as `dtype`."""
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def drafter_of(
    make: Make[Drafter], config: Any, tensors: Mapping[str, Tensor], name_in_file: Names
) -> Drafter:
    """Return the drafter of a checked checkpoint's tensors, not attached to a target."""
    d2t = tensors.get("d2t")
    ids = None if d2t is None else token_ids(d2t.long().flatten(), config.vocab_size)
    drafter = make(config, ids)
    fill_parameters(drafter, tensors, name_in_file)
    return drafter.eval()


def check_stored(
    make: Make[Drafter], config: Any, stored: Stored, name_in_file: Names, path: Path
) -> None:
    """Check a checkpoint's files without their values. Raises DSparkError if they do not fit."""
    ids = stored_draft_ids(stored, config.vocab_size, path, config.draft_vocab_size)
    check_weights(lambda: make(config, ids), stored, name_in_file, path)


def read_drafter(
    make: Make[Drafter], config: Any, stored: Stored, name_in_file: Names, path: Path
) -> Drafter:
    """Read a checkpoint in float32, not attached. Raises DSparkError if it does not fit."""
    ids = stored_draft_ids(stored, config.vocab_size, path, config.draft_vocab_size)
    return built(lambda: make(config, ids), stored, name_in_file, path).eval()
