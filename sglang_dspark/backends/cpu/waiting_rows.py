"""Defer context rows of the draft by cache slot.

Without drafts the draft's cache is not read, and most rows that decoding and prefills would
write to it are never read: their requests end before the next draft. A deferred row is at place
`slot % places`. So a row of the slot's next generation replaces that of the last one, which no
request sees any more, and rows of slots that the prefix cache keeps stay available.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from sglang_dspark.backends.cpu.csrc import operator


class _Rows(ctypes.Structure):
    """`Waiting` of csrc/context.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("features", "positions", "slots", "waits")),
        *((name, c_int64) for name in ("places", "width")),
    )


class WaitingRows:
    """Deferred rows: features [places, m*d] of tokens at positions [places], for cache slots.

    waits [places]: whether a row waits there; the previous content stays readable until the next
    `keep`.
    """

    def __init__(self, places: int, width: int):
        """Allocate without any row; the system maps memory when places are used."""
        self.features = torch.empty(places, width)
        self.positions, self.slots = torch.empty(2, places, dtype=torch.int64).unbind()
        self.waits = torch.zeros(places, dtype=torch.bool)
        held = (self.features, self.positions, self.slots, self.waits)
        self._rows = _Rows(*(each.data_ptr() for each in held), places, width)
        self._at, p, n = ctypes.addressof(self._rows), c_void_p, c_int64
        self._keep = operator("keep_context", p, p, p, p, n, n, returns=n)
        self._take = operator("take_context", p, p, n, p, p, n, p, returns=n)

    def keep(self, hidden: Tensor, positions: Tensor, slots: Tensor, first: int) -> int:
        """Copy rows `first` and later of hidden [n, m*d] to their places.

        positions, slots: [n] int64. Stops at a row whose place another slot's row occupies, and
        returns its number; n if all are copied.
        """
        assert self._keep is not None
        rows = (hidden.data_ptr(), positions.data_ptr(), slots.data_ptr())
        return int(self._keep(self._at, *rows, first, len(hidden)))

    def take_context(self, table: Tensor, rows: Tensor, lens: Tensor) -> Tensor:
        """Return places of rows that wait for slots table[rows[r], :lens[r]] of requests r, [n].

        table: [., context] int32; rows, lens: [R] int64. The rows wait no longer.
        """
        assert self._take is not None
        found = torch.empty(int(torch.count_nonzero(self.waits)), dtype=torch.int64)
        if not len(found):
            return found
        rows, lens = rows.long().contiguous(), lens.long().contiguous()
        count = self._take(
            self._at, table.data_ptr(), table.stride(0), rows.data_ptr(), lens.data_ptr(),
            len(rows), found.data_ptr(),
        )  # fmt: skip
        return found[:count]

    def take_from(self, first: int, most: int) -> Tensor:
        """Return up to `most` places of waiting rows, cyclically from place `first`, [n] int64."""
        places = self.waits.nonzero().flatten()
        found = places.roll(-int((places < first).sum()))[:most]
        self.waits[found] = False
        return found

    def forget(self, slots: Tensor) -> None:
        """Drop rows that wait for slots [n]: newer rows replace them."""
        if len(self.slots):
            places = slots % len(self.slots)
            self.waits[places[self.slots[places] == slots]] = False
