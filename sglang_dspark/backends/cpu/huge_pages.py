"""Memory for weights that every step reads from end to end, on huge pages where there are any.

A processor looks up where each page of 4 KiB lies, and its prefetchers stop where one ends. So int8
panels (weight_formats.py), which are read in one stream, come faster from pages of 2 MiB
(dev/LOG.md). Most weights are smaller than such a page: they share large pieces, each let go
with the last of its weights. bfloat16, read in rows at a stride, loses by it at one row.
"""

from __future__ import annotations

import logging
import mmap
import threading

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

logger = logging.getLogger(__name__)

PAGE = 2 << 20
PIECE = 32 * PAGE
_LINE = 64  # of a cache

_Memory = NDArray[np.uint8]


class _Pieces:
    """What of the newest piece nobody has."""

    def __init__(self) -> None:
        self._left: _Memory = np.empty(0, np.uint8)
        self._lock = threading.Lock()  # two weights in one place would be noticed by nobody

    def take(self, size: int) -> _Memory:
        """So many bytes from the start of a cache line on. Raises OSError where there are none."""
        whole = -(-size // _LINE) * _LINE
        with self._lock:
            if whole > len(self._left):
                self._left = _piece(max(PIECE, whole))
            taken, self._left = self._left[:size], self._left[whole:]
        return taken


def _piece(size: int) -> _Memory:
    """New memory from the start of a huge page on; pages come when they are first written."""
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    found = mmap.mmap(-1, size + PAGE, flags=kind)
    try:
        found.madvise(mmap.MADV_HUGEPAGE)
    except (AttributeError, OSError) as error:  # not Linux, or a kernel without huge pages
        logger.info("sglang-dspark: %d MiB of weights on ordinary pages: %s", size >> 20, error)
    memory: _Memory = np.frombuffer(found, np.uint8)
    start = -memory.ctypes.data % PAGE
    return memory[start : start + size]


_pieces = _Pieces()


def empty(size: int) -> Tensor:
    """[size] uint8 of any content, a storage of its own."""
    return torch.from_numpy(_pieces.take(size))
