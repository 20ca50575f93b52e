"""Windows of known lengths, as the stages of a step hand them to each other."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor


def indptr_of(lengths: Sequence[int]) -> Tensor:
    """[R + 1] int32 of windows with so many drafts each."""
    rows = (drafts + 1 for drafts in lengths)
    return torch.tensor([0, *accumulate(rows)], dtype=torch.int32)
