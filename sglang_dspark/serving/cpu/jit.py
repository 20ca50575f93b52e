"""Numba settings shared by the CPU kernels.

The kernels compile for the processor they run on (AVX2 or wider) at the first start and are cached
on disk. Sums may be reassociated, which is what lets them use vector registers; NaN and infinity
keep their meaning.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

FAST = {"reassoc", "contract", "nsz", "arcp"}


def kernel(function: Callable[..., Any]) -> Any:
    """Compile for one thread; the caller holds no GIL meanwhile."""
    return njit(cache=True, fastmath=FAST, nogil=True)(function)


def parallel_kernel(function: Callable[..., Any]) -> Any:
    """Compile with `prange` loops spread over Numba's threads."""
    return njit(cache=True, fastmath=FAST, nogil=True, parallel=True)(function)
