"""Penalise a verify window row by row, from counts of output tokens, on any device.

Plain decoding penalises the row after a prefix by the prefix's output tokens
(sglang/srt/sampling/penaltylib), here including drafts of the same window. The frequency and
presence penalties are subtracted, stop tokens are forbidden below min_new_tokens, then the
repetition penalty scales seen tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Penalties:
    """Settings of P requests.

    frequency, presence, repetition: [P, 1] float32, repetition > 0. minimum: [P, 1] int64, output
    tokens before which `stops` [P, S] int64 are forbidden. A shorter list of stops repeats a token,
    and a request without stops has minimum 0.
    """

    frequency: Tensor
    presence: Tensor
    repetition: Tensor
    minimum: Tensor
    stops: Tensor

    def of(self, part: slice) -> Penalties:
        """Return the settings of a part of the requests."""
        return Penalties(
            self.frequency[part],
            self.presence[part],
            self.repetition[part],
            self.minimum[part],
            self.stops[part],
        )


def penalise_windows(
    logits: Tensor,
    rows: Tensor,
    window: Tensor,
    counts: Tensor,
    outputs: Tensor,
    penalties: Penalties,
) -> None:
    """Penalise the logits of P requests' windows in place, each row for the tokens before it.

    logits: [R, W, V] float, W = gamma + 1 rows each. rows: [P] int64, the requests' places among R.
    window: [R, W] int64, anchors and drafts. counts: [P, V] of any type, occurrences of each output
    token, anchor included. outputs: [P] int64, number of output tokens. The host reads no value.
    Rows after the verified ones are penalised too and must be ignored.
    """
    seen = counts.to(torch.float32, copy=True)  # [P, V]
    one = seen.new_ones(len(rows), 1)
    # One place at a time: whole windows would need several times the memory of the logits.
    for place in range(window.shape[1]):
        if place > 0:
            seen.scatter_add_(1, window[rows, place, None], one)
        short = (outputs + place)[:, None] < penalties.minimum  # [P, 1]
        found = _penalised(logits[rows, place].float(), seen, short, penalties)
        logits[:, place].index_copy_(0, rows, found.to(logits.dtype))


def _penalised(row: Tensor, seen: Tensor, short: Tensor, penalties: Penalties) -> Tensor:
    """Penalise rows [P, V] float32 by counts `seen` [P, V]; short [P, 1]: forbid stop tokens."""
    once = seen > 0
    row = row - penalties.frequency * seen - penalties.presence * once
    stops = row.gather(1, penalties.stops).masked_fill(short, -torch.inf)
    row = row.scatter(1, penalties.stops, stops)
    scaled = torch.where(row < 0, row * penalties.repetition, row / penalties.repetition)
    return torch.where(once, scaled, row)
