"""Writing files whole: a temporary name beside the file, a rename when all of it is there.

Readers see the earlier file or the new one, and what fails leaves nothing behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sglang_dspark.common.files import fault
from sglang_dspark.errors import DSparkError


@contextmanager
def replacing(path: Path, *, alone: bool = False) -> Iterator[Path]:
    """A temporary name to write to, which takes the place of `path` when the block ends.

    Folders above it are made. Anything that is raised leaves the earlier file as it was.
    alone: only one process writes the file. The temporary name is the same in each then, so that
    the next one overwrites what a killed one left of a large file.
    """
    name = f"{path.name}.tmp" if alone else f".{path.name}.{os.getpid()}"
    temporary = path.with_name(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def permit_as_new(path: Path) -> None:
    """Give a file the permissions of any new file of this process.

    safetensors writes files for their owner alone. Others who read a model or a drafter, a
    container's user for one, would be told that it does not exist.
    """
    mask = os.umask(0)  # the only way to read it
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def replace_text(path: Path, text: str, what: str) -> None:
    """Write the file `path`, a `what`, in UTF-8.

    Raises DSparkError when it cannot be written.
    """
    require_file_or_nothing(path)
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DSparkError(f"cannot write {what} to {path}: {fault(error)}") from error


def require_file_or_nothing(path: Path) -> None:
    """DSparkError where a folder, device or pipe stands: renaming a file over it would replace it,
    /dev/null too for those who may."""
    if path.exists() and not path.is_file():
        raise DSparkError(f"{path} is no file that can be replaced; name another one")
