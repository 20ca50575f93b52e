"""Write files atomically: to a temporary name in the same directory, which is then renamed.

Readers see the earlier file or the new one. A failed write leaves no temporary file.
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
    """Yield a temporary path to write to, and rename it to `path` when the block ends.

    Creates parent directories. If the block raises, the earlier file stays unchanged.
    alone: only one process writes the file. The temporary name is then the same in every process,
    so that the next write overwrites a large partial file that a killed process left.
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

    safetensors creates files that only their owner can read. Other users of a model or drafter,
    such as a container's user, would get an error that it does not exist.
    """
    mask = os.umask(0)  # umask can only be read by setting it
    os.umask(mask)
    path.chmod(0o666 & ~mask)


def replace_text(path: Path, text: str, what: str) -> None:
    """Write the file `path` in UTF-8. what: names the file in the error message.

    Raises DSparkError if it cannot be written.
    """
    require_file_or_nothing(path)
    try:
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DSparkError(f"cannot write {what} to {path}: {fault(error)}") from error


def require_file_or_nothing(path: Path) -> None:
    """Raise DSparkError if `path` is a folder, device or pipe.

    Renaming a file over it would replace it, even /dev/null for a process that may do so.
    """
    if path.exists() and not path.is_file():
        raise DSparkError(f"{path} is no file that can be replaced; name another one")
