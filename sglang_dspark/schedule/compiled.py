"""Compile the planner's functions once for this processor, cached on disk.

Floating point stays as written (no reassociation): ranks and repeats must agree bitwise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from sglang_dspark.common.machine_code import folder_of, kept


@cache
def cache_folder() -> Path:
    """Return the folder of the machine code, named by the source of this package.

    Raises DSparkError for a user without a home.
    """
    return folder_of("schedule", sorted(Path(__file__).parent.glob("*.py")))


def compiled(function: Callable[..., Any]) -> Any:
    """The function as machine code for one thread; the caller holds no GIL meanwhile."""
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    return kept(function, cache_folder, **options)
