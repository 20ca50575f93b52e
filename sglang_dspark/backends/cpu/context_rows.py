"""Features of context tokens that wait until a draft wants to see them, found by cache slot.

While nothing is drafted nobody reads the draft's cache, and most of what decoding and prefills
would write to it is never read: its requests end before the next draft. A row waits at place
`slot % places`. So a slot's next tenant takes the place of the row of its last one, which nobody
can see any more, and rows of slots that the prefix cache hands on are still there.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.backends.cpu.jit import kernel

_Index = NDArray[np.int64]


class WaitingRows(NamedTuple):
    """features [places, m*d] of the tokens at positions [places], for the cache slots in slots.

    waits [places]: whether a row waits there; what was there before stays readable until the next
    `keep`. number [1]: rows that wait.
    """

    features: NDArray[np.float32]
    positions: _Index
    slots: _Index
    waits: NDArray[np.bool_]
    number: _Index


def waiting_rows(places: int, width: int) -> WaitingRows:
    """No rows yet. Memory is taken as places are used."""
    return WaitingRows(
        np.empty((places, width), np.float32),
        np.empty(places, np.int64),
        np.empty(places, np.int64),
        np.zeros(places, np.bool_),
        np.zeros(1, np.int64),
    )


@kernel
def keep(waiting, hidden, chosen, start, positions, slots):  # type: ignore[no-untyped-def]
    """Copy rows hidden[chosen[start:]] to their places, up to one that another slot's row holds.

    Returns how many of `chosen` are done.
    """
    places = waiting.slots.shape[0]
    for j in range(start, chosen.shape[0]):
        i = chosen[j]
        place = slots[i] % places
        if not waiting.waits[place]:
            waiting.waits[place] = True
            waiting.number[0] += 1
        elif waiting.slots[place] != slots[i]:
            return j
        waiting.features[place] = hidden[i]
        waiting.positions[place] = positions[i]
        waiting.slots[place] = slots[i]
    return chosen.shape[0]


@kernel
def take_context(waiting, table, rows, lens):  # type: ignore[no-untyped-def]
    """Places of rows that waited for the slots table[rows[r], :lens[r]] of requests r, [n] int64.

    table: [rows, context] int32. They do not wait any more.
    """
    places = waiting.slots.shape[0]
    found = np.empty(waiting.number[0], np.int64)
    count = 0
    for r in range(rows.shape[0]):
        for position in range(lens[r]):
            slot = np.int64(table[rows[r], position])
            place = slot % places
            if waiting.waits[place] and waiting.slots[place] == slot:
                waiting.waits[place] = False
                found[count] = place
                count += 1
    waiting.number[0] -= count
    return found[:count]


@kernel
def take_from(waiting, first, most):  # type: ignore[no-untyped-def]
    """Up to `most` places with rows that waited, from place `first` on and round, [n] int64."""
    places = waiting.slots.shape[0]
    found = np.empty(min(most, waiting.number[0]), np.int64)
    count, place = 0, first
    while count < found.shape[0]:
        if waiting.waits[place]:
            waiting.waits[place] = False
            found[count] = place
            count += 1
        place = (place + 1) % places
    waiting.number[0] -= count
    return found


@kernel
def forget(waiting, chosen, slots):  # type: ignore[no-untyped-def]
    """What waits for slots[chosen] is superseded."""
    places = waiting.slots.shape[0]
    if waiting.number[0] == 0:
        return
    for i in chosen:
        place = slots[i] % places
        if waiting.waits[place] and waiting.slots[place] == slots[i]:
            waiting.waits[place] = False
            waiting.number[0] -= 1
