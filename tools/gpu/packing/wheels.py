"""Download and thin the wheels of a server beyond torch and Triton, pinned in `wheels.txt`.

They are those of `requirements/cpu.lock` that a machine for CUDA work lacks, for its Python. Of
SGLang and its kernels only the part that serves a text model on an H100 is kept. Dropped are image
and video generation, Rust code (Python replaces it), operators of attention backends that are not
used here (FlashAttention 3, FlashMLA, InfLLM) and those of other chips. If a server imports but
does not use code of further wheels, a file of `stand_ins` is sent instead.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from packaging.tags import compatible_tags, cpython_tags
from packaging.utils import parse_wheel_filename

from sglang_dspark.common.hashes import file_sha256
from sglang_dspark.errors import DSparkError

PINS = Path(__file__).resolve().parents[1] / "wheels.txt"
PYTHONS = ("3.11", "3.12")  # versions with digests in the list; the GPU machine has 3.12
LEFT_OUT = {
    "sglang": ("sglang/multimodal_gen/*", "sglang/*.so"),
    "sglang-kernel": ("sgl_kernel/flash*_ops*", "sgl_kernel/infllm_ops*", "sgl_kernel/sm100/*"),
}
_STAND_INS = Path(__file__).parent / "stand_ins"
_OPS = "sglang/kernels/ops"
STAND_INS = {
    "sglang": {
        f"{_OPS}/gemm/cutedsl_dual_gemm.py": _STAND_INS / "cutedsl_dual_gemm.py",
        f"{_OPS}/attention/flash_mla_interface.py": _STAND_INS / "flash_mla_interface.py",
    },
}
# Every glibc that the machine may have: pip matches each number exactly.
_PLATFORMS = tuple(
    f"manylinux{glibc}_x86_64"
    for glibc in ("1", "2010", "2014", *(f"_2_{minor}" for minor in range(5, 40)))
)


@dataclass(frozen=True)
class Pin:
    """One line of the list. digests: SHA-256 of the allowed wheels, one for each Python."""

    name: str
    version: str
    digests: tuple[str, ...]

    def line(self) -> str:
        """Format the line for pip."""
        hashes = " ".join(f"--hash=sha256:{digest}" for digest in self.digests)
        return f"{self.name}=={self.version} {hashes}"


def read_pins(path: Path = PINS) -> tuple[Pin, ...]:
    """Read the list. Raises DSparkError for a line without version or digest."""
    pins = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        found = re.fullmatch(r"([\w.-]+)==(\S+)((?: --hash=sha256:[0-9a-f]{64})+)", line.strip())
        if found is None:
            raise DSparkError(f"{path}, line {number}: write NAME==VERSION --hash=sha256:DIGEST")
        pins.append(Pin(found[1], found[2], tuple(re.findall(r"[0-9a-f]{64}", found[3]))))
    return tuple(pins)


def obtain(pins: Sequence[Pin], folder: Path, python: str) -> dict[str, Path]:
    """Download a checked wheel for each pin, by name; wheels with the right digest are reused.

    python: `3.12`. Raises DSparkError, in one line, if the package index lacks one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = _there(pins, folder, python)
    if len(found) < len(pins):
        _download([pin for pin in pins if pin.name not in found], folder, python)
        found = _there(pins, folder, python)
    lost = [pin.name for pin in pins if pin.name not in found]
    if lost:
        raise DSparkError(f"pip brought no wheel of {', '.join(lost)} as {PINS.name} pins it")
    return found


def thin(name: str, wheel: Path, out: Path) -> Path:
    """Write the wheel to `out` without the package's `LEFT_OUT` and with its `STAND_INS`.

    It is compressed by LZMA, which pip reads too, and is more than 20% smaller. Raises DSparkError
    if the wheel lacks a file that a stand-in replaces.
    """
    patterns, instead = LEFT_OUT.get(name, ()), STAND_INS.get(name, {})

    def stays(member: str) -> bool:
        return not any(fnmatch(member, pattern) for pattern in patterns)

    thinned = out / wheel.name
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(thinned, "w") as kept:
        if lost := sorted(set(instead) - set(whole.namelist())):
            raise DSparkError(f"{wheel.name} has no {lost[0]} any more: see {_STAND_INS.name}")
        for info in whole.infolist():
            if not stays(info.filename):
                continue
            content = whole.read(info)
            if info.filename in instead:
                content = instead[info.filename].read_bytes()
            elif info.filename.endswith(".dist-info/RECORD"):
                content = _recorded(content.decode(), stays, instead).encode()
            kept.writestr(info, content, zipfile.ZIP_LZMA)
    return thinned


def _recorded(record: str, stays: Callable[[str], bool], instead: Mapping[str, Path]) -> str:
    """Return the RECORD of a thinned wheel: kept files, stand-ins without digest and size."""
    lines = []
    for line in record.splitlines():
        file = line.split(",")[0]
        if stays(file):
            lines.append(f"{file},,\n" if file in instead else f"{line}\n")
    return "".join(lines)


def recipe(pins: Sequence[Pin], python: str) -> str:
    """Return a text of all that determines the contents of a parcel of these wheels."""
    instead = [each for files in STAND_INS.values() for each in files.items()]
    texts = [f"{member}\n{file.read_text()}" for member, file in instead]
    return "\n".join([python, *(pin.line() for pin in pins), repr(LEFT_OUT), *texts])


def _there(pins: Sequence[Pin], folder: Path, python: str) -> dict[str, Path]:
    """Return the folder's wheels that are pinned and fit the Python version, by name."""
    major, minor = map(int, python.split("."))
    fitting = {*cpython_tags((major, minor), platforms=_PLATFORMS)}
    fitting |= {*compatible_tags((major, minor), platforms=_PLATFORMS)}
    files = [file for file in folder.glob("*.whl") if parse_wheel_filename(file.name)[3] & fitting]
    digests = {file_sha256(file): file for file in files}
    return {pin.name: digests[each] for pin in pins for each in pin.digests if each in digests}


def _download(pins: Sequence[Pin], folder: Path, python: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    command += [f"--platform={platform}" for platform in _PLATFORMS]
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as listed:
        listed.write("".join(f"{pin.line()}\n" for pin in pins))
        listed.flush()
        command += ["--dest", str(folder), "--requirement", listed.name]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (said or done.stderr.splitlines() or ["pip said nothing"])[0]
        raise DSparkError(f"the wheels cannot be fetched ({reason}); fix this and pack again")
