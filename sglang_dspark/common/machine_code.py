"""Compile functions with Numba and cache them on disk, so that later starts need not compile them.

Numba's own cache (numba/core/caching.py, `FunctionCache`) lets any fault of its files end
the process, so that an interrupted start or a full disk would break all later ones. Here such a
file is rewritten, and without a writable cache the function is compiled at each start.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba import njit
from numba.core.caching import FunctionCache

from sglang_dspark.common.files import fault
from sglang_dspark.errors import DSparkError
from sglang_dspark.paths import cache_root

logger = logging.getLogger(__name__)


class _Cache(FunctionCache):  # type: ignore[misc]
    """Numba's cache, except that an unreadable file counts as missing."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        try:
            return super().load_overload(sig, target_context)
        except Exception as error:  # unpickling can raise any exception
            logger.warning(
                "sglang-dspark: %s in %s is compiled again: what was kept cannot be read (%s)",
                self._py_func.__name__,
                self.cache_path,
                fault(error),
            )
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):  # a full disk: the next start compiles again
            super().save_overload(sig, data)


def folder_of(name: str, sources: Iterable[Path]) -> Path:
    """Return the folder of these files' machine code; each version of their text has its own.

    Numba itself watches only the file that defines a function, and would reuse old code of
    functions in other files. Raises DSparkError if the user has no home directory.
    """
    digest = hashlib.sha256()
    for file in sources:
        digest.update(file.read_bytes())
    return cache_root() / "sglang-dspark" / name / digest.hexdigest()[:16]


def kept(function: Callable[..., Any], folder: Callable[[], Path], **options: Any) -> Any:
    """Return `function` compiled to machine code, cached in `folder`. options: of `numba.njit`."""
    compiled = njit(**options)(function)
    ordinary = numba.config.CACHE_DIR
    try:
        numba.config.CACHE_DIR = str(folder())  # Numba reads it while it creates the cache
        compiled._cache = _Cache(function)  # njit(cache=True) sets Numba's own cache here
    except (DSparkError, RuntimeError):  # no home directory, or no writable folder
        pass
    finally:
        numba.config.CACHE_DIR = ordinary
    return compiled
