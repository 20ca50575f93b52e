"""How the planner's functions are compiled: once for this processor, kept on disk.

Floating point stays as written (no reassociation): ranks and repeats must agree bit for bit. The
cache folder carries a digest of this room's source, because Numba watches only the file a function
stands in and not the files of what it calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from sglang_dspark.kept_code import kept
from sglang_dspark.paths import cache_root


@cache
def _cache_folder() -> Path:
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    return cache_root() / "sglang-dspark" / "schedule" / digest.hexdigest()[:16]


def compiled(function: Callable[..., Any]) -> Any:
    """The function as machine code for one thread; the caller holds no GIL meanwhile."""
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    return kept(function, _cache_folder, **options)
