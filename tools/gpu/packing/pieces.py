"""Split parcels into pieces that are small enough to send, and join them on arrival.

A parcel is a tar of files. Its pieces are numbered through all parcels, in the order of sending;
the manifest in the same folder has SHA-256 of each piece and of the whole tar. Standard library
only: the machine that receives pieces has no other packages yet.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sglang_dspark.common.hashes import file_sha256
from sglang_dspark.errors import DSparkError
from tools.gpu.files import write_whole

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Piece:
    """One file that is sent: `N-PARCEL.tar`. sha256: hex."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Parcel:
    """A tar in pieces. made_of: digest of its recipe and cut; sha256: of the whole tar."""

    name: str
    made_of: str
    sha256: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Contents:
    """Contents of a parcel. recipe: a text that determines the files completely.
    fill: writes the files to an empty folder."""

    name: str
    recipe: str
    fill: Callable[[Path], None]


def pack(
    contents: Sequence[Contents], folder: Path, most: int, say: Callable[[str], None]
) -> tuple[Parcel, ...]:
    """Write all parcels in pieces of at most `most` bytes; intact ones are kept.

    The manifest grows by each finished parcel, so an interrupted run resumes. Other `*.tar` files
    in the folder are deleted. Raises DSparkError for a size below 1 and a damaged manifest, and as
    `fill` does.
    """
    if most < 1:
        raise DSparkError(f"pieces of {most} bytes hold nothing; give a size of at least 1 MiB")
    before = {parcel.name: parcel for parcel in read_manifest(folder)}
    parcels: tuple[Parcel, ...] = ()
    for each in contents:
        first = 1 + sum(len(parcel.pieces) for parcel in parcels)
        made_of = hashlib.sha256(f"{each.recipe}\n{first} {most}".encode()).hexdigest()
        parcel = before.get(each.name)
        if parcel is None or parcel.made_of != made_of or missing(parcel, folder):
            parcel = _make(each, made_of, folder, first, most)
        parcels = (*parcels, parcel)
        write_manifest(folder, parcels)
        for piece in parcel.pieces:
            say(f"{folder / piece.name}: {piece.bytes / 2**20:.1f} MiB")
    named = {piece.name for parcel in parcels for piece in parcel.pieces}
    for stray in set(folder.glob("*.tar")) - {folder / name for name in named}:
        stray.unlink()
    return parcels


def missing(parcel: Parcel, folder: Path) -> list[str]:
    """Return the names of pieces that are missing from the folder or damaged."""
    return [piece.name for piece in parcel.pieces if not intact(piece, folder)]


def intact(piece: Piece, folder: Path) -> bool:
    """Return whether the folder has the piece, byte for byte."""
    file = folder / piece.name
    if not file.is_file() or file.stat().st_size != piece.bytes:
        return False
    return file_sha256(file) == piece.sha256


def open_parcel(parcel: Parcel, folder: Path, out: Path) -> None:
    """Extract the parcel's files to the folder `out`; all its pieces must be in `folder`.

    Raises DSparkError if the joined pieces differ from the parcel.
    """
    with tempfile.TemporaryFile(dir=out.parent) as whole:
        found = hashlib.sha256()
        for piece in parcel.pieces:
            block = (folder / piece.name).read_bytes()
            found.update(block)
            whole.write(block)
        if found.hexdigest() != parcel.sha256:
            raise DSparkError(
                f"the pieces of {parcel.name} in {folder} make another file than {MANIFEST} says; "
                "pack it and send all of them again"
            )
        whole.seek(0)
        with tarfile.open(fileobj=whole) as tar:
            tar.extractall(out, filter="data")


def read_manifest(folder: Path) -> tuple[Parcel, ...]:
    """Return the parcels of a folder's manifest, () without one. Raises DSparkError if damaged."""
    file = folder / MANIFEST
    if not file.is_file():
        return ()
    try:
        rows = json.loads(file.read_text(encoding="utf-8"))["parcels"]
        return tuple(
            Parcel(**{**row, "pieces": tuple(Piece(**piece) for piece in row["pieces"])})
            for row in rows
        )
    except (ValueError, KeyError, TypeError):
        raise DSparkError(f"{file} is damaged; delete it and pack or send it again") from None


def write_manifest(folder: Path, parcels: Sequence[Parcel]) -> None:
    """Write the manifest of a folder."""
    rows = [asdict(parcel) for parcel in parcels]
    write_whole(folder / MANIFEST, json.dumps({"parcels": rows}, indent=2) + "\n")


def _make(each: Contents, made_of: str, folder: Path, first: int, most: int) -> Parcel:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{each.name}-", dir=folder) as scratch:
        files, whole = Path(scratch) / "files", Path(scratch) / "whole.tar"
        files.mkdir()
        each.fill(files)
        _tar(files, whole)
        pieces = _cut(whole, folder, each.name, first, most)
        return Parcel(each.name, made_of, file_sha256(whole), pieces)


def _tar(files: Path, out: Path) -> None:
    """Write a reproducible tar of all files below a folder: sorted, without times and owners."""

    def timeless(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.mtime = info.uid = info.gid = 0
        info.uname = info.gname = ""
        info.mode = 0o644
        return info

    with tarfile.open(out, "w") as tar:
        for path in sorted(path for path in files.rglob("*") if path.is_file()):
            tar.add(path, path.relative_to(files).as_posix(), filter=timeless)


def _cut(whole: Path, folder: Path, name: str, first: int, most: int) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    with whole.open("rb") as file:
        while block := file.read(most):
            piece = f"{first + len(pieces)}-{name}.tar"
            write_whole(folder / piece, block)
            pieces.append(Piece(piece, len(block), hashlib.sha256(block).hexdigest()))
    return tuple(pieces)
