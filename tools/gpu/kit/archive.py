"""Pack the files that a stage writes besides its rows: server logs, traces, kernel caches.

A call returns few files of limited size, so files are packed into parts, each a `.tar.xz` that can
be unpacked alone. Kernel caches can be sent back: parts that arrive with a later call are unpacked
before kernels compile. Standard library only.
"""

from __future__ import annotations

import lzma
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

LOGS, CACHES = "logs", "caches"
PART_BYTES = 15 << 20  # a call returns files of 16 MiB at most
PARTS = {LOGS: 2, CACHES: 3}  # with a stage's rows and the call's own log: seven files of eight
_SLACK = 1 << 20  # most bytes that xz buffers before it writes
_SOURCES = (".ttir", ".ttgir", ".llir", ".ptx", ".o", ".cu", ".cpp", ".ninja", ".lock", ".source")


def cache_variables(home: Path) -> dict[str, str]:
    """Return variables that place Triton's and SGLang's kernel caches in `home/caches`.

    Triton's index has absolute paths, so parts can be used only under the same `home`.
    """
    caches = home / CACHES
    return {
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "SGLANG_JIT_CACHE_DIR": str(caches / "jit"),
    }


def pack_folder(folder: Path, out: Path, name: str, say: Callable[[str], None]) -> list[Path]:
    """Pack a folder into `out/NAME-1.tar.xz`, `-2`, ... and return the parts' paths.

    Smaller files are packed first. Files beyond `PARTS[name]` parts are skipped and reported. Files
    of Triton's and SGLang's caches that a cache hit does not read are skipped.
    """
    parts: list[Path] = []
    files = sorted(_wanted(folder), key=lambda file: file.stat().st_size)
    while files and len(parts) < PARTS[name]:
        path = out / f"{name}-{len(parts) + 1}.tar.xz"
        files = _fill(path, files, folder)
        parts.append(path)
    if files:
        say(f"{name}: {len(files)} files do not fit, the first is {files[0].relative_to(folder)}")
    return parts


def unpack_parts(folder: Path, name: str, into: Path) -> list[str]:
    """Unpack `folder/NAME-*.tar.xz` into a folder; return a line for each damaged part."""
    wrong = []
    for part in sorted(folder.glob(f"{name}-*.tar.xz")):
        into.mkdir(parents=True, exist_ok=True)
        try:
            # Discard a truncated part as a whole: a cache would use a partial kernel.
            with tempfile.TemporaryDirectory(dir=into) as scratch:
                with tarfile.open(part) as archive:
                    archive.extractall(scratch, filter="data")
                shutil.copytree(scratch, into, dirs_exist_ok=True)
        except (OSError, EOFError, tarfile.TarError, lzma.LZMAError) as error:
            wrong.append(f"{part.name} is damaged ({error}); it is not used")
    return wrong


def _wanted(folder: Path) -> Iterator[Path]:
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.is_symlink() and file.suffix not in _SOURCES:
            yield file


def _fill(path: Path, files: Iterable[Path], root: Path) -> list[Path]:
    """Pack files until the part is full; return the remaining ones."""
    left = list(files)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}")
    with (
        partial.open("wb") as raw,
        lzma.open(raw, "wb", preset=1) as packed,
        tarfile.open(fileobj=packed, mode="w|") as archive,
    ):
        while left and raw.tell() + _packed_bound(left[0]) + _SLACK < PART_BYTES:
            archive.add(left[0], str(left[0].relative_to(root)), recursive=False)
            left.pop(0)
    partial.replace(path)
    return left


def _packed_bound(file: Path) -> int:
    """Bound a file's bytes in a part: traces are compressed already, text shrinks fivefold."""
    size = file.stat().st_size
    return size if file.suffix in (".gz", ".so", ".cubin") else size // 3
