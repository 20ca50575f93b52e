"""List the parcels in the order of use: SGLang and its imports, the demo's models, any prompts."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from sglang_dspark.common.hashes import file_sha256, named_sha256
from sglang_dspark.models import source
from sglang_dspark.models.drafters import DEMO_DRAFTER, shipped_drafter_path
from sglang_dspark.training.prompts import read_prompts
from tools.gpu.packing.arrival import PROMPTS, SGLANG
from tools.gpu.packing.pieces import Contents
from tools.gpu.packing.wheels import Pin, obtain, read_pins, recipe, thin


def all_parcels(downloads: Path, python: str, prompts: Sequence[Path] = ()) -> tuple[Contents, ...]:
    """List the kit's parcels for a Python version.

    downloads: folder of wheels and weights. prompts: JSONL files of prompts to train on. Raises
    DSparkError for an invalid file of prompts.
    """
    drafter = shipped_drafter_path()
    weights = f"{source.GGUF_SHA256} {named_sha256(sorted(drafter.iterdir()))}"
    return (
        _wheels(read_pins(), downloads, python),
        Contents("smollm", weights, partial(_models, downloads, drafter)),
        *_prompts(prompts),
    )


def _wheels(pins: tuple[Pin, ...], downloads: Path, python: str) -> Contents:
    def fill(folder: Path) -> None:
        for package, wheel in obtain(pins, downloads, python).items():
            thin(package, wheel, folder)

    return Contents(SGLANG, recipe(pins, python), fill)


def _models(downloads: Path, drafter: Path, folder: Path) -> None:
    """Copy the demo target's GGUF, which the GPU machine converts, and its drafter."""
    kept = downloads / source.GGUF_NAME
    if not kept.is_file() or file_sha256(kept) != source.GGUF_SHA256:
        downloads.mkdir(parents=True, exist_ok=True)
        kept = source.obtain_gguf(downloads)
    shutil.copyfile(kept, folder / source.GGUF_NAME)
    shutil.copytree(drafter, folder / DEMO_DRAFTER)


def _prompts(files: Sequence[Path]) -> tuple[Contents, ...]:
    """Return a parcel of the prompt files, numbered in their order; empty without files."""
    if not files:
        return ()
    for file in files:
        read_prompts(file, strict=False)

    def fill(folder: Path) -> None:
        for number, file in enumerate(files):
            shutil.copyfile(file, folder / f"{number}-{file.stem}.jsonl")

    return (Contents(PROMPTS, " ".join(file_sha256(file) for file in files), fill),)
