"""What is sent: SGLang with all it imports, and the demo's models, in the order of their use."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

from sglang_dspark.common.hashes import file_sha256, named_sha256
from sglang_dspark.models import source
from sglang_dspark.models.drafters import DEMO_DRAFTER, shipped_drafter_path
from tools.gpu.packing.arrival import SGLANG
from tools.gpu.packing.pieces import Contents
from tools.gpu.packing.wheels import LEFT_OUT, Pin, obtain, read_pins, thin


def all_parcels(downloads: Path, python: str) -> tuple[Contents, ...]:
    """The parcels of the kit for a Python version. downloads: where wheels and weights are kept."""
    drafter = shipped_drafter_path()
    weights = f"{source.GGUF_SHA256} {named_sha256(sorted(drafter.iterdir()))}"
    return (
        _wheels(read_pins(), downloads, python),
        Contents("smollm", weights, partial(_models, downloads, drafter)),
    )


def _wheels(pins: tuple[Pin, ...], downloads: Path, python: str) -> Contents:
    recipe = "\n".join([python, *(pin.line() for pin in pins), repr(LEFT_OUT)])

    def fill(folder: Path) -> None:
        for package, wheel in obtain(pins, downloads, python).items():
            thin(package, wheel, folder)

    return Contents(SGLANG, recipe, fill)


def _models(downloads: Path, drafter: Path, folder: Path) -> None:
    """The demo target's GGUF, converted where it arrives, and its drafter."""
    kept = downloads / source.GGUF_NAME
    if not kept.is_file() or file_sha256(kept) != source.GGUF_SHA256:
        downloads.mkdir(parents=True, exist_ok=True)
        kept = source.obtain_gguf(downloads)
    shutil.copyfile(kept, folder / source.GGUF_NAME)
    shutil.copytree(drafter, folder / DEMO_DRAFTER)
