"""A training batch: blocks of several sequences packed without padding."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """S sequences' contexts end to end (N tokens) and their P blocks of gamma positions.

    A context ends after its last anchor: no block sees tokens after it.

    tokens            [N] int64       context tokens of all sequences end to end
    features          [N, m*d]        target features of those tokens, in the stored dtype
    last_hidden       [N, d]          target's last hidden state (after the final norm) of the same
    context_positions [N] int64       position of each within its sequence
    starts            [S+1] int64     cumulative context lengths
    hidden            [P, gamma, d]   target's last hidden state at p+k-1: the distribution of
    token p+k
    log_partition     [P, gamma]      logsumexp of the logits of that distribution, over the
    vocabulary
    anchors           [P] int64       anchor token x_0, at position p
    sequence          [P] int64       sequence of each block, ascending
    positions         [P] int64       p >= 1; a block sees its sequence's context positions < p
    inputs, labels    [P, gamma]      tokens at p+k-1 and p+k
    valid             [P, gamma] bool False if p+k is past the end of the answer
    """

    tokens: Tensor
    features: Tensor
    last_hidden: Tensor
    context_positions: Tensor
    starts: Tensor
    hidden: Tensor
    log_partition: Tensor
    anchors: Tensor
    sequence: Tensor
    positions: Tensor
    inputs: Tensor
    labels: Tensor
    valid: Tensor

    @property
    def gamma(self) -> int:
        """Return the number of positions in a block."""
        return self.labels.shape[1]

    def to(self, device: torch.device | str) -> PackedBatch:
        """Return the same batch on another device."""
        return PackedBatch(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})
