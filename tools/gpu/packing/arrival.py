"""Receive pieces on the GPU machine: check them, keep them until their parcel is complete, install.

Parcels are installed outside of the tree, which every call sends anew: in $KIT_HOME, or
~/.cache/sglang-dspark-kit. A parcel of wheels becomes a folder of packages, any other a folder of
its files. Standard library and pip only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_dspark import __version__
from sglang_dspark.errors import DSparkError
from tools.gpu.files import write_whole
from tools.gpu.packing.pieces import (
    MANIFEST,
    Parcel,
    intact,
    missing,
    open_parcel,
    read_manifest,
    write_manifest,
)

SGLANG = "sglang"  # the parcel of wheels: SGLang and what it imports
PROMPTS = "prompts"  # files of prompts to train on, if the packer was given any
_DIGEST = ".parcel"  # in an installed parcel: SHA-256 of the tar that it came from
_PLUGIN = "plugin"
_TOOLKIT = Path("/usr/local/cuda")
_ROOT = Path(__file__).resolve().parents[3]


def kit_home() -> Path:
    """Return the folder in which parcels are installed and models are written."""
    named = os.environ.get("KIT_HOME")
    return Path(named) if named else Path.home() / ".cache" / "sglang-dspark-kit"


def take_in(folder: Path, home: Path, say: Callable[[str], None]) -> list[str]:
    """Receive the pieces in `folder`, install complete parcels, and return a line for each error.

    Earlier pieces and the manifest are kept in `home`.
    """
    try:
        parcels = read_manifest(folder) or read_manifest(home)
    except DSparkError as error:
        return [str(error)]
    if not parcels:
        lost = sorted(file.name for file in folder.glob("*.tar"))
        return [f"{', '.join(lost)} came without {MANIFEST}; send it too"] if lost else []
    write_manifest(home, parcels)
    wrong = []
    for parcel in parcels:
        if installed(parcel, home):
            continue
        wrong += _keep(parcel, folder, home / "pieces")
        if missing(parcel, home / "pieces"):
            continue
        try:
            _install(parcel, home)
        except DSparkError as error:
            wrong.append(str(error))
        else:
            say(f"{parcel.name} is installed")
    return wrong


def installed(parcel: Parcel, home: Path) -> bool:
    """Return whether this exact parcel is installed."""
    stamp = home / parcel.name / _DIGEST
    return stamp.is_file() and stamp.read_text() == parcel.sha256


def has(name: str, home: Path) -> bool:
    """Return whether the manifest's parcel of that name is installed."""
    return any(installed(each, home) for each in read_manifest(home) if each.name == name)


def waits_for(names: Sequence[str], home: Path) -> list[str]:
    """Return the names, without suffix, of these parcels' missing pieces."""
    wanted = [each for each in read_manifest(home) if each.name in names]
    absent = [each for each in wanted if not installed(each, home)]
    pieces = [piece for each in absent for piece in missing(each, home / "pieces")]
    return [piece.removesuffix(".tar") for piece in pieces]


def environment(home: Path) -> dict[str, str]:
    """Return the variables of a process that runs from the parcel of SGLang; empty without it.

    SGLang's Rust code is not sent, because it is linked to one version of torch, and its kernels
    are those of another release, which torch 2.11 can load. SGLang looks for CUDA's libraries next
    to the `nvcc` of $PATH, which may be a script that only calls the toolkit's.
    """
    if not has(SGLANG, home):
        return {}
    _announce(home / _PLUGIN)
    toolkit = {"CUDA_HOME": str(_TOOLKIT)} if (_TOOLKIT / "bin" / "nvcc").is_file() else {}
    return {
        **({} if "CUDA_HOME" in os.environ else toolkit),
        "PYTHONPATH": f"{home / SGLANG}{os.pathsep}{home / _PLUGIN}",
        "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
    }


def _keep(parcel: Parcel, folder: Path, kept: Path) -> list[str]:
    """Copy a parcel's intact new pieces to `kept`; return a line for each damaged one."""
    wrong = []
    for piece in parcel.pieces:
        came = folder / piece.name
        if not came.is_file() or intact(piece, kept):
            continue
        if intact(piece, folder):
            write_whole(kept / piece.name, came.read_bytes())
        else:
            wrong.append(f"piece {piece.name} is damaged or of another packing; send it again")
    return wrong


def _install(parcel: Parcel, home: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f".{parcel.name}-", dir=home) as scratch:
        found = Path(scratch) / "files"
        found.mkdir()
        open_parcel(parcel, home / "pieces", found)
        if wheels := sorted(found.glob("*.whl")):
            site = Path(scratch) / "site"
            _unpack_wheels(parcel.name, wheels, site)
            found = site
        (found / _DIGEST).write_text(parcel.sha256)
        shutil.rmtree(home / parcel.name, ignore_errors=True)
        found.rename(home / parcel.name)
    for piece in parcel.pieces:
        (home / "pieces" / piece.name).unlink()


def _unpack_wheels(name: str, wheels: Sequence[Path], site: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--no-compile", "--no-cache-dir", "--target", str(site), *map(str, wheels)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (said or done.stderr.splitlines() or ["pip said nothing"])[0]
        raise DSparkError(
            f"{name} cannot be installed ({reason}); pack for this Python: tools/gpu/pack --python "
            f"{sys.version_info.major}.{sys.version_info.minor}"
        )


def _announce(site: Path) -> None:
    """Write metadata by which SGLang finds this tree's plugin, as for an installed package."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    about = site / f"sglang_dspark-{__version__}.dist-info"
    header = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {__version__}\n"
    write_whole(about / "METADATA", header)
    write_whole(about / "entry_points.txt", "\n".join(lines) + "\n")
