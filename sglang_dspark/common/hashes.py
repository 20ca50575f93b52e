"""Hash files with SHA-256, to identify a file among others of the same name."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path

_BLOCK = 1 << 22


def file_sha256(path: Path, watch: Callable[[int], None] = lambda done: None) -> str:
    """Return hex SHA-256 of a file's bytes. watch: called after each block with the bytes done."""
    digest = hashlib.sha256()
    done = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            done += len(block)
            watch(done)
    return digest.hexdigest()


def named_sha256(files: Iterable[Path]) -> str:
    """Return hex SHA-256 over the names and bytes of files, in the order given."""
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()
