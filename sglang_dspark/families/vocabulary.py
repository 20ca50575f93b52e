"""Read and write a reduced draft vocabulary of a checkpoint: `d2t`, as EAGLE3 stores it.

d2t[i] is token id minus i of draft column i; `t2d` marks the token ids that have a column. SGLang
reads them for EAGLE3; for DFLASH and EAGLE it ignores them and drafts over the whole vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sglang_dspark.drafter.reduced_vocabulary import token_ids
from sglang_dspark.drafter.weight_files import Stored, load_tensors
from sglang_dspark.errors import DSparkError


def to_d2t(draft_ids: Tensor) -> Tensor:
    """Convert ascending token ids [V'] to d2t [V'] int64."""
    return draft_ids - torch.arange(len(draft_ids), device=draft_ids.device)


def to_t2d(draft_ids: Tensor, vocab_size: int) -> Tensor:
    """Convert token ids [V'] to t2d [V] bool, True if a token can be drafted."""
    inside = torch.zeros(vocab_size, dtype=torch.bool)
    inside[draft_ids.cpu()] = True
    return inside


def stored_draft_ids(
    stored: Stored, vocab_size: int, path: Path, count: int | None = None
) -> Tensor | None:
    """Return token ids [V'] of a checkpoint's draft columns, or None if it covers all tokens.

    count: V' that its config.json states. Raises DSparkError if the number differs, or if ids
    repeat or are outside the vocabulary.
    """
    d2t = load_tensors({"d2t": stored["d2t"]})["d2t"] if "d2t" in stored else None
    found = vocab_size if d2t is None else d2t.numel()
    if count is not None and found != count:
        raise DSparkError(
            f"{path}: d2t names {found} tokens, config.json's draft_vocab_size is {count}; "
            "the files belong to different drafters"
        )
    if d2t is None:
        return None
    try:
        return token_ids(d2t.long().flatten(), vocab_size)
    except ValueError:
        raise DSparkError(
            f"{path}: d2t does not name distinct tokens of a vocabulary of {vocab_size}; "
            "the checkpoint belongs to another target or is damaged"
        ) from None


def check_draft_ids(draft_ids: Tensor | None, vocab_size: int) -> None:
    """Raise ValueError unless ids are None or ascend, distinct, within the vocabulary, [V']."""
    if draft_ids is None:
        return
    sorted_once = bool((draft_ids.diff() > 0).all())
    if not sorted_once or int(draft_ids[0]) < 0 or int(draft_ids[-1]) >= vocab_size:
        raise ValueError(f"draft ids must ascend within 0..{vocab_size - 1}")


def columns_of(draft_ids: Tensor | None, vocab_size: int) -> Tensor:
    """Map token id to draft column, [V] int64, -1 for tokens that cannot be drafted."""
    if draft_ids is None:
        return torch.arange(vocab_size)
    columns = torch.full((vocab_size,), -1, device=draft_ids.device)
    columns[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)
    return columns
