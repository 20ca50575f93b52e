"""Model folders made here and kept in the user's cache: whole, or not there at all."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sglang_dspark.errors import DSparkError


@contextmanager
def built(path: Path) -> Iterator[Path]:
    """A folder to write to, which becomes `path` when the block ends; nothing is left otherwise.

    Raises DSparkError when the disk refuses.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as scratch:
            out = Path(scratch) / path.name
            out.mkdir()
            yield out
            if not path.is_dir():  # another process may have been first
                out.rename(path)
    except OSError as error:
        raise DSparkError(f"cannot build {path}: {error}; free some disk") from error
