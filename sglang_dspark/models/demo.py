"""Build and check the demo target, SmolLM2-135M-Instruct (Apache-2.0), in the user's cache.

It is built once from pinned weights, in a temporary directory that is renamed when complete. A
manifest (`provenance.json`) has the hash of each file. Later calls compare only sizes and times: a
changed file is hashed again, and a directory that does not match its manifest is rebuilt.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sglang_dspark.common.atomic_write import replacing
from sglang_dspark.common.files import load_json
from sglang_dspark.errors import DSparkError
from sglang_dspark.models import source
from sglang_dspark.models.source import Progress, silent
from sglang_dspark.paths import cache_root

NAME = "smollm2-135m-instruct"
MANIFEST = "provenance.json"
_STAMP = ".checked.json"  # sizes and times of the files when their hashes were last compared
_FORMAT = 1
_NEEDED_BYTES = 900_000_000  # output, GGUF and wheel at the same time


def demo_target_path(cache_dir: Path | None = None) -> Path:
    """Return the directory of the demo target, built or not.

    cache_dir: root of the cache; default `$XDG_CACHE_HOME` or `~/.cache`.
    """
    return (cache_dir or cache_root()) / "sglang-dspark" / "models" / NAME


def ensure_demo_target(
    cache_dir: Path | None = None,
    progress: Progress = silent,
    *,
    force: bool = False,
    gguf: Path | None = None,
) -> Path:
    """Return the directory of the demo target as Hugging Face float32 files; build it if needed.

    cache_dir: as in `demo_target_path`. force: build even if a good copy exists.
    gguf: a local copy of the source file, for machines without a network.
    A copy that fails its check is rebuilt, which `progress` reports as a separate stage.
    Raises DSparkError if the weights cannot be fetched, are not the pinned ones, or do not fit
    on the disk.
    """
    path = demo_target_path(cache_dir)
    if not force and path.is_dir() and damage(path, progress) is None:
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent / f".{NAME}.lock", progress):
            found = damage(path, progress) if path.is_dir() else "not built yet"
            if found is None and not force:  # another process built it meanwhile
                return path
            if path.is_dir():
                progress(f"rebuilding: {found or 'asked for'}", 0, 0)
            _build(path, progress, gguf)
    except OSError as error:
        raise DSparkError(
            f"cannot build the demo target in {path.parent}: {error}; needs "
            f"{_NEEDED_BYTES // 10**6} MB of free disk, or choose a place with --cache-dir"
        ) from error
    return path


def damage(path: Path, progress: Progress = silent) -> str | None:
    """Describe what is wrong with a built target; None when all files match the manifest."""
    manifest = _read_json(path / MANIFEST)
    if manifest is None or manifest.get("format") != _FORMAT:
        return f"no usable {MANIFEST}"
    expected: dict[str, dict[str, Any]] = manifest["files"]
    stamp = _read_json(path / _STAMP) or {}
    for name, entry in expected.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != entry["bytes"]:
            return f"{name} has {file.stat().st_size} bytes, expected {entry['bytes']}"
        if stamp.get(name) == _fingerprint(file):
            continue
        if source.watched_sha256(file, "checking demo target", progress) != entry["sha256"]:
            return f"{name} has changed (SHA-256 differs)"
    if any(stamp.get(name) != _fingerprint(path / name) for name in expected):
        _write_stamp(path, list(expected))
    return None


def provenance(path: Path) -> dict[str, Any]:
    """Return the manifest of a built target. Raises DSparkError if it is missing."""
    manifest = _read_json(path / MANIFEST)
    if manifest is None:
        raise DSparkError(f"no {MANIFEST} in {path}; build the target with `dspark models demo`")
    return manifest


def _build(path: Path, progress: Progress, gguf: Path | None) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < _NEEDED_BYTES:
        raise OSError(f"only {free // 10**6} MB free")
    with tempfile.TemporaryDirectory(prefix=f".{NAME}-", dir=path.parent) as scratch:
        out = Path(scratch) / NAME
        out.mkdir()
        if gguf is None:
            gguf = source.obtain_gguf(Path(scratch), progress)
        else:
            source.check_gguf(gguf, progress)
        from sglang_dspark.models.convert import convert  # numpy, gguf: only when building

        convert(gguf, out, progress)
        _write_manifest(out, progress)
        _swap_in(out, path, Path(scratch) / "old")


def _write_manifest(out: Path, progress: Progress) -> None:
    files = sorted(p for p in out.iterdir() if p.is_file())
    entries = {
        p.name: {"bytes": p.stat().st_size, "sha256": source.watched_sha256(p, "hashing", progress)}
        for p in files
    }
    manifest = {
        "format": _FORMAT,
        "model": "HuggingFaceTB/SmolLM2-135M-Instruct",
        "license": "Apache-2.0",
        "source": {
            "package": source.PACKAGE,
            "version": source.PACKAGE_VERSION,
            "file": source.GGUF_NAME,
            "sha256": source.GGUF_SHA256,
            "note": "Q4_1 weights (embedding Q8_0), dequantised to float32",
        },
        "files": entries,
        "tools": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("gguf", "numpy", "safetensors", "tokenizers")},
        },
        "built": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    _write_stamp(out, list(entries))


def _swap_in(new: Path, path: Path, old: Path) -> None:
    """Sync a complete directory's files and rename it to `path`; move an earlier one aside."""
    for file in new.iterdir():
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
    if path.exists():
        path.rename(old)
    new.rename(path)


def _write_stamp(path: Path, names: list[str]) -> None:
    stamp = json.dumps({name: _fingerprint(path / name) for name in names})
    try:
        with replacing(path / _STAMP) as temporary:
            temporary.write_text(stamp)
    except PermissionError:
        return  # a read-only cache is hashed at each call, which is only slower


def _fingerprint(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        value = load_json(path, finite=False)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock file, so that two commands do not build the same target at once."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another build of the demo target", 0, 0)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
