"""Pack blocks by their anchors, without a mask (anchor-bounded packing; paper, 5.1).

A step has a few sequences and a fixed number of anchors in each. Their blocks are packed densely,
share the context of their own sequence, and see neither each other nor any token at or after their
anchor. Token-level indices define the visible tokens: there is no mask of the packed length
squared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_dspark.families.learning.batch import PackedBatch
from sglang_dspark.training.store import Response

Spans = Sequence[tuple[int, int]]


def anchor_positions(answers: Spans, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` anchors [count] int64 in the answers, without replacement if there are enough.

    answers: [start, end) of each answer in the sequence. Every anchor has at least one token of its
    answer after it. Raises ValueError if no answer has two tokens.
    """
    places = torch.cat([torch.arange(a, b - 1) for a, b in answers if b - a >= 2] or [_NOWHERE])
    if not len(places):
        raise ValueError(f"no answer in {list(answers)} has two tokens to learn from")
    picked = torch.randperm(len(places), generator=generator)[:count]
    if len(picked) < count:
        extra = torch.randint(len(places), (count - len(picked),), generator=generator)
        picked = torch.cat([picked, extra])
    return places[picked]


_NOWHERE = torch.empty(0, dtype=torch.long)


def pack(responses: Sequence[Response], anchors: Sequence[Tensor], gamma: int) -> PackedBatch:
    """Gather the tensors of a step; `anchors[s]` [A_s] are positions in `responses[s]`."""
    context: dict[str, list[Tensor]] = {
        k: [] for k in ("tokens", "features", "last_hidden", "context_positions")
    }
    blocks: dict[str, list[Tensor]] = {
        k: [] for k in ("hidden", "log_partition", "inputs", "labels", "valid")
    }
    for r, p in zip(responses, anchors, strict=True):
        n = int(p.max()) + 1
        context["tokens"].append(r.tokens[:n])
        context["features"].append(r.features[:n])
        context["last_hidden"].append(r.hidden[:n])
        context["context_positions"].append(torch.arange(n))
        for name, rows in _blocks(r, p, gamma).items():
            blocks[name].append(rows)
    lengths = torch.tensor([0, *(len(t) for t in context["tokens"])])
    per_sequence = torch.tensor([len(p) for p in anchors])
    joined = {name: torch.cat(rows) for name, rows in (context | blocks).items()}
    return PackedBatch(
        starts=lengths.cumsum(0),
        anchors=joined["inputs"][:, 0],
        sequence=torch.repeat_interleave(torch.arange(len(anchors)), per_sequence),
        positions=torch.cat(list(anchors)),
        **joined,
    )


def _blocks(r: Response, p: Tensor, gamma: int) -> dict[str, Tensor]:
    """Return one sequence's blocks after anchors p [A]: fields of PackedBatch, [A, gamma, ..]."""
    ends = torch.tensor([b for _, b in r.answers])
    end = ends[torch.searchsorted(ends, p, right=True)]  # of the answer the anchor is in
    at = p[:, None] + torch.arange(gamma)  # position of the input token x_{k-1}
    valid = at < end[:, None] - 1
    at = torch.minimum(at, end[:, None] - 2)
    return {
        "hidden": r.hidden[at],
        "log_partition": r.log_partition[at],
        "inputs": r.tokens[at],
        "labels": r.tokens[at + 1],
        "valid": valid,
    }
