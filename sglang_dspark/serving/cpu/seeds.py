"""Seeds of the requests of a batch, and seeded draws in SGLang's plain sampler on a CPU.

SGLang reads a request's `sampling_seed` (OpenAI: `seed`) under
--enable-deterministic-inference alone, which no CPU backend has, and its DSPARK never reads it.
Here every batch carries them in upstream's own field `SamplingBatchInfo.sampling_seed` [R] int64,
which it filters, merges and copies. A request without a seed has UNSEEDED there and is sampled as
ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.serving.cpu import seeded_ops

UNSEEDED = -(2**63)  # as a request's own seed it means none
_ANCHORS = "dspark_anchors"  # attribute of a step's sampling info


@dataclass(frozen=True)
class SeededWaits:
    """The e_v of verify/seeded.py for the requests of a draft block that have a seed.

    rows: [S] int64, their places in the batch. waits: [S, gamma, n] float32 > 0.
    """

    rows: Tensor
    waits: Tensor


def batch_seeds(reqs: Sequence[Any]) -> Tensor:
    """[R] int64 of SGLang's requests."""
    seeds = [req.sampling_params.sampling_seed for req in reqs]
    return torch.tensor([UNSEEDED if seed is None else seed for seed in seeds], dtype=torch.int64)


def seeds_of(sampling_info: Any) -> Tensor | None:
    """The seeds [R] of a batch in which some request is sampled with one; else None."""
    if sampling_info is None or sampling_info.is_all_greedy:
        return None
    seeds = sampling_info.sampling_seed
    if seeds is None or not bool((seeds != UNSEEDED).any()):
        return None
    return seeds


def note_anchors(sampling_info: Any, anchors: Tensor) -> None:
    """Leave the positions [R] of a step's anchors for `seeded_waits`, which nobody hands them."""
    if seeds_of(sampling_info) is not None:
        setattr(sampling_info, _ANCHORS, anchors.long())


def seeded_waits(sampling_info: Any, tokens: Tensor, gamma: int) -> SeededWaits | None:
    """The waits of a draft block's seeded requests; None where no request has a seed.

    tokens: [n] int64, the draft vocabulary.
    """
    seeds = seeds_of(sampling_info)
    if seeds is None:
        return None
    rows = (seeds != UNSEEDED).nonzero()[:, 0]
    positions = getattr(sampling_info, _ANCHORS)[rows, None] + torch.arange(gamma)
    drawn = seeded_ops.waits(seeds[rows].repeat_interleave(gamma), positions.flatten(), tokens)
    return SeededWaits(rows, drawn.view(len(rows), gamma, len(tokens)))


def seeded_tokens(tokens: Tensor, probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """tokens [R] with those of seeded requests drawn anew from probs [R, V] float."""
    seeded = seeds != UNSEEDED
    if bool(seeded.any()):
        drawn = seeded_ops.choose(probs[seeded].float(), seeds[seeded], positions[seeded].long())
        tokens[seeded] = drawn.to(tokens.dtype)
    return tokens
