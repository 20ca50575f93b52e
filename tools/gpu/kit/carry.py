"""Send a trained drafter back in files below 16 MiB, which `tools/gpu/join FOLDER OUT` joins.

They are the pieces of `packing/pieces.py`, with SHA-256 of each and of the whole in the manifest.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from sglang_dspark.common.hashes import named_sha256
from sglang_dspark.errors import DSparkError
from tools.gpu.packing.pieces import MANIFEST, Contents, missing, open_parcel, pack, read_manifest

MOST = 15 << 20  # bytes of a file


def send(name: str, drafter: Path, folder: Path) -> dict[str, int]:
    """Split a drafter's files into pieces in `folder`; return the bytes of each piece by name."""

    def fill(files: Path) -> None:
        shutil.copytree(drafter, files, dirs_exist_ok=True)

    digest = named_sha256(sorted(file for file in drafter.iterdir() if file.is_file()))
    parcels = pack([Contents(name, digest, fill)], folder, MOST, lambda line: None)
    return {piece.name: piece.bytes for parcel in parcels for piece in parcel.pieces}


def join(folder: Path, out: Path) -> list[Path]:
    """Join the drafters of `folder`, each into a folder of its name in `out`.

    Raises DSparkError if there are none, a piece is missing or damaged, or the drafter's folder
    exists already.
    """
    parcels = read_manifest(folder)
    if not parcels:
        raise DSparkError(f"{folder} has no {MANIFEST}; give the folder of a training stage")
    made = []
    for parcel in parcels:
        if absent := missing(parcel, folder):
            raise DSparkError(f"{folder} lacks {', '.join(absent)}, or they are damaged")
        place = out / parcel.name
        if place.exists():
            raise DSparkError(f"{place} is there already; choose another folder")
        place.mkdir(parents=True)
        open_parcel(parcel, folder, place)
        made.append(place)
    return made


def main() -> int:
    """Join; return 0 after printing the folders, or 1 after printing the error on one line."""
    parser = argparse.ArgumentParser(prog="tools/gpu/join", description=__doc__)
    parser.add_argument("folder", type=Path, help="of the pieces, such as results/train")
    parser.add_argument("out", type=Path, help="where the drafter's folder is made")
    options = parser.parse_args()
    try:
        for place in join(options.folder, options.out):
            print(place)
    except (DSparkError, OSError) as error:
        print(f"join: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
