"""Compile the planner's functions once for this processor, cached on disk.

Floating-point operations are not reordered: ranks and repeated runs must agree bitwise.
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

    Raises DSparkError if the user has no home directory.
    """
    return folder_of("schedule", sorted(Path(__file__).parent.glob("*.py")))


def compiled(function: Callable[..., Any]) -> Any:
    """Return the function as machine code that runs in one thread without the GIL."""
    options = {"nogil": True, "error_model": "numpy", "boundscheck": False}
    return kept(function, cache_folder, **options)
