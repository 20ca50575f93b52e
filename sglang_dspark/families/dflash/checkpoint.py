"""Read and write DFlash checkpoints in the format that SGLang serves as DFLASH."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sglang_dspark.drafter.checkpoint import built, write_checkpoint
from sglang_dspark.drafter.target_fit import Target, require_sizes, target_with
from sglang_dspark.drafter.weight_files import stored_tensors
from sglang_dspark.families.dflash.model import DFlashConfig, DFlashDrafter
from sglang_dspark.families.vocabulary import stored_draft_ids, to_d2t


def save_dflash(drafter: DFlashDrafter, path: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write a checkpoint that SGLang serves as DFLASH; names are the backbone's own."""
    tensors = {k.removeprefix("backbone."): v.to(dtype) for k, v in drafter.state_dict().items()}
    if drafter.draft_ids is not None:
        tensors["d2t"] = to_d2t(drafter.draft_ids)
    write_checkpoint(path, tensors, drafter.config.to_json())


def load_dflash(
    path: Path, embed_tokens: Tensor, lm_head: Tensor, num_layers: int | None = None
) -> DFlashDrafter:
    """Load in float32 and attach to the target's embedding and LM head [V, d].

    num_layers: of the target; not checked. Raises DSparkError for a missing, damaged or foreign
    checkpoint and for another target.
    """
    drafter = read_dflash(path, target_with(embed_tokens))
    drafter.attach(embed_tokens, lm_head)
    return drafter.eval()


def read_dflash(path: Path, target: Target) -> DFlashDrafter:
    """Read in float32, not attached to the target. Raises DSparkError as `load_dflash` does."""
    config = DFlashConfig.from_dir(path)
    vocab_size = config.shape.vocab_size
    require_sizes(path, config.shape.hidden_size, vocab_size, target)
    stored = stored_tensors(path)
    ids = stored_draft_ids(stored, vocab_size, path)
    return built(
        lambda: DFlashDrafter(config, ids),
        stored,
        lambda name: name.removeprefix("backbone."),
        path,
    )
