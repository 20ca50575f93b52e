"""Build model folders in the user's cache, either complete or not at all."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sglang_dspark.errors import DSparkError


@contextmanager
def built(path: Path) -> Iterator[Path]:
    """Yield a folder to write to; rename it to `path` if the block succeeds, else delete it.

    Raises DSparkError if the disk reports an error.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as scratch:
            out = Path(scratch) / path.name
            out.mkdir()
            yield out
            if not path.is_dir():  # another process may have built it first
                out.rename(path)
    except OSError as error:
        raise DSparkError(f"cannot build {path}: {error}; free some disk") from error
