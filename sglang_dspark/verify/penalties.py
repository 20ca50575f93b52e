"""Penalties row by row of a verify window, from counts of output tokens, on any device.

What plain decoding does to the row behind a prefix (sglang/srt/sampling/penaltylib) depends
on the prefix's output tokens, drafts of the same window included: the frequency and presence
penalties are subtracted, stop tokens are forbidden below min_new_tokens, then the repetition
penalty scales what was seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Penalties:
    """Settings of P requests.

    frequency, presence, repetition: [P, 1] float32, repetition > 0. minimum: [P, 1] int64, output
    tokens before which none of `stops` [P, S] int64 may come; a shorter list repeats a token, and a
    request without any has minimum 0.
    """

    frequency: Tensor
    presence: Tensor
    repetition: Tensor
    minimum: Tensor
    stops: Tensor

    def of(self, part: slice) -> Penalties:
        """Settings of some of the requests."""
        return Penalties(
            self.frequency[part],
            self.presence[part],
            self.repetition[part],
            self.minimum[part],
            self.stops[part],
        )


# Float32 copies of [P, V] that `penalise_windows` holds at most, its `counts` among them.
COPIES = 9


def penalise_windows(
    logits: Tensor,
    rows: Tensor,
    window: Tensor,
    counts: Tensor,
    outputs: Tensor,
    penalties: Penalties,
) -> None:
    """Penalise the logits of P requests' windows in place, each row for the tokens in front of it.

    logits: [R, W, V] float, W = gamma + 1 rows each. rows: [P] int64, the requests' places among R.
    window: [R, W] int64, anchors and drafts. counts: [P, V] of any type, how often each token was
    put out, anchor included. outputs: [P] int64, how many tokens that were. No value is looked at.
    Rows behind what was verified are penalised as well, and mean nothing.
    """
    seen = counts.to(torch.float32, copy=True)  # [P, V]
    one = seen.new_ones(len(rows), 1)
    # Place by place: whole windows at once would take the memory of the logits several times.
    for place in range(window.shape[1]):
        if place > 0:
            seen.scatter_add_(1, window[rows, place, None], one)
        short = (outputs + place)[:, None] < penalties.minimum  # [P, 1]
        found = _penalised(logits[rows, place].float(), seen, short, penalties)
        logits[:, place].index_copy_(0, rows, found.to(logits.dtype))


def _penalised(row: Tensor, seen: Tensor, short: Tensor, penalties: Penalties) -> Tensor:
    """Rows [P, V] float32 behind tokens `seen` [P, V] times; short [P, 1]: no stop token yet."""
    once = seen > 0
    row = row - penalties.frequency * seen - penalties.presence * once
    stops = row.gather(1, penalties.stops).masked_fill(short, -torch.inf)
    row = row.scatter(1, penalties.stops, stops)
    scaled = torch.where(row < 0, row * penalties.repetition, row / penalties.repetition)
    return torch.where(once, scaled, row)
