"""Pack the files that a stage leaves next to its rows: server logs, traces, kernel caches.

A call returns few files of limited size, so files are packed into parts, each a `.tar.xz` that can
be unpacked alone. Kernel caches go the other way too: parts that come with a later call are
unpacked before anything compiles. Standard library only.
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
_SLACK = 1 << 20  # xz keeps up to so much before it writes
_SOURCES = (".ttir", ".ttgir", ".llir", ".ptx", ".o", ".cu", ".cpp", ".ninja", ".lock", ".source")


def cache_variables(home: Path) -> dict[str, str]:
    """Return variables by which Triton and SGLang keep compiled kernels in `home/caches`.

    Triton's index has absolute paths, so parts are of use where `home` is the same.
    """
    caches = home / CACHES
    return {
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "SGLANG_JIT_CACHE_DIR": str(caches / "jit"),
    }


def pack_folder(folder: Path, out: Path, name: str, say: Callable[[str], None]) -> list[Path]:
    """Pack a folder into `out/NAME-1.tar.xz` and so on; the parts' paths.

    Larger files come last, and what exceeds `PARTS[name]` parts is skipped and named. Files of
    Triton's and SGLang's caches that a cache hit does not read are skipped.
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
    """Unpack `folder/NAME-*.tar.xz` into a folder; one line for each part that is damaged."""
    wrong = []
    for part in sorted(folder.glob(f"{name}-*.tar.xz")):
        into.mkdir(parents=True, exist_ok=True)
        try:
            # Nothing of a part that is cut off: a cache would use half a kernel.
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
    """Pack files until the part is full; those left."""
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
    """Bytes that a file may take in a part: traces are packed already, text shrinks fivefold."""
    size = file.stat().st_size
    return size if file.suffix in (".gz", ".so", ".cubin") else size // 3
