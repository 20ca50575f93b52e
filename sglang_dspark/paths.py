"""Locate the folder of the package's cached files."""

from __future__ import annotations

import os
from pathlib import Path

from sglang_dspark.errors import DSparkError


def cache_root() -> Path:
    """Return the root of the user's caches: `$XDG_CACHE_HOME` or `~/.cache`; ours is inside it.

    Raises DSparkError if the user has no home directory, as in a container with any user number.
    """
    configured = os.environ.get("XDG_CACHE_HOME", "")
    if Path(configured).is_absolute():
        return Path(configured)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        raise DSparkError("no home folder to keep a cache in; set XDG_CACHE_HOME") from None
