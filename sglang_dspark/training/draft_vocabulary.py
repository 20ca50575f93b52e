"""Choose the tokens that a drafter with a reduced vocabulary can propose."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from sglang_dspark.drafter.heads import restricted_tokens
from sglang_dspark.drafter.weight_files import read_tensors, stored_tensors
from sglang_dspark.errors import DSparkError
from sglang_dspark.families.vocabulary import stored_draft_ids
from sglang_dspark.training.store import StoreReader


def token_counts(reader: StoreReader, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Count the tokens of the answers [V], and return their bigrams as ids [2, n]."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    pairs = []
    for i in range(len(reader)):
        tokens, _ = reader.tokens(i)
        for start, end in reader.answers(i):
            answer = tokens[max(start - 1, 0) : end]
            counts += torch.bincount(tokens[start:end], minlength=vocab_size)
            pairs.append(torch.stack([answer[:-1], answer[1:]]))
    return counts, torch.cat(pairs, 1)


def draft_vocabulary(counts: Tensor, size: int) -> tuple[Tensor, float]:
    """Return the `size` most frequent tokens, ascending ids [n], and their share of the text."""
    ids = counts.topk(min(size, len(counts))).indices
    coverage = float(counts[ids].sum() / counts.sum().clamp(min=1))
    return ids.sort().values, coverage


def vocabulary_of(path: Path, size: int, vocab_size: int) -> Tensor:
    """Return the draft vocabulary [size] of a drafter's directory, from `d2t` or Markov weights.

    Raises DSparkError if it has another size or there is none.
    """
    if (stored := stored_draft_ids(stored_tensors(path), vocab_size, path)) is not None:
        ids: Tensor | None = stored
        found = len(stored)
    else:
        tensors = read_tensors(path)
        names = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")
        if any(name not in tensors for name in names):
            raise DSparkError(f"{path} holds neither d2t nor a Markov head: it drafts all tokens")
        ids = restricted_tokens(*(tensors[name].float() for name in names))
        found = tensors[names[0]].shape[0] if ids is None else len(ids)
    if ids is None or found != size:
        raise DSparkError(
            f"{path} drafts from {found} tokens, drafter.draft_vocab says {size}: set it to {found}"
        )
    return ids
