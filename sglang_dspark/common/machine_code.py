"""Functions compiled by Numba and kept on disk, so that the next start need not compile them.

Numba's own cache (numba/core/caching.py, `FunctionCache`) lets any fault of its files end
the process: a start that was cut off or a full disk would forbid all later ones. Here such a file
is written anew, and where nothing can be kept the function is compiled at each start.
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
    """Numba's, where a bad file is as good as none."""

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
    """Return the folder of these files' machine code: another folder for every text of theirs.

    Numba itself watches only the file that defines a function, and would keep the old code of what
    it calls from another one. Raises DSparkError for a user without a home.
    """
    digest = hashlib.sha256()
    for file in sources:
        digest.update(file.read_bytes())
    return cache_root() / "sglang-dspark" / name / digest.hexdigest()[:16]


def kept(function: Callable[..., Any], folder: Callable[[], Path], **options: Any) -> Any:
    """The function as machine code, which is kept in `folder`; options: of `numba.njit`."""
    compiled = njit(**options)(function)
    ordinary = numba.config.CACHE_DIR
    try:
        numba.config.CACHE_DIR = str(folder())  # read while the cache is made
        compiled._cache = _Cache(function)  # what njit(cache=True) does with Numba's own
    except (DSparkError, RuntimeError):  # no home, or no folder that can be written
        pass
    finally:
        numba.config.CACHE_DIR = ordinary
    return compiled
