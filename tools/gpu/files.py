"""Write files atomically: a temporary name, then a rename. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically; readers see the old or the new content. Creates parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_bytes(content.encode() if isinstance(content, str) else content)
    partial.replace(path)
