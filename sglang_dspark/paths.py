"""Where the package keeps files of its own."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """Root of the user's caches: `$XDG_CACHE_HOME` or `~/.cache`; ours is a folder in it."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    return Path(configured) if Path(configured).is_absolute() else Path.home() / ".cache"
