"""Compile loops that are not in the C++ library with Numba.

They compile for the host's processor at the first start, and are cached on disk in a
folder named by a hash of their source. Division follows numpy (no ZeroDivisionError), as a check
would prevent vectorisation. Float operations run in the order of the source: newly compiled code
is optimised across more functions than code read from disk, and both must give bitwise the same
results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from sglang_dspark.common.machine_code import folder_of, kept


@cache
def cache_folder() -> Path:
    """Return the cache folder, named by a hash of this folder's source."""
    return folder_of("kernels", sorted(Path(__file__).parent.glob("*.py")))


def kernel(function: Callable[..., Any]) -> Any:
    """Compile for one thread, without the GIL; sums keep their order and zeros their signs.

    `fastmath` is explicit, as Numba would otherwise inherit it from the first caller.
    """
    return kept(function, cache_folder, nogil=True, error_model="numpy", fastmath=False)
