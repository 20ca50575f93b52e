"""Pack in pieces what a server needs on a GPU machine without a network: `tools/gpu/pack`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from sglang_dspark.errors import DSparkError
from tools.gpu.packing.parcels import all_parcels
from tools.gpu.packing.pieces import pack
from tools.gpu.packing.wheels import PYTHONS

_RUNS = Path(__file__).resolve().parents[3] / "runs" / "gpu"


def main() -> int:
    """Pack; return 0 if all pieces are written, or 1 after printing the error on one line."""
    parser = argparse.ArgumentParser(prog="tools/gpu/pack", description=__doc__)
    parser.add_argument("--out", type=Path, default=_RUNS / "pieces", help="folder for the pieces")
    parser.add_argument(
        "--downloads", type=Path, default=_RUNS / "downloads", help="what was fetched, to be kept"
    )
    parser.add_argument("--python", choices=PYTHONS, default="3.12", help="of the machine")
    parser.add_argument("--most", type=int, default=48, metavar="MIB", help="size of a piece")
    parser.add_argument(
        "--prompts", type=Path, action="append", default=[], help="a JSONL file to train on"
    )
    options = parser.parse_args()
    try:
        contents = all_parcels(options.downloads, options.python, options.prompts)
        parcels = pack(contents, options.out, options.most * 2**20, print)
    except (DSparkError, OSError) as error:
        print(f"pack: {error}", file=sys.stderr)
        return 1
    print(f"pack: {sum(len(parcel.pieces) for parcel in parcels)} pieces in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
