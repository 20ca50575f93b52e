"""Installs everything into the environment that runs it: what is behind `make setup`.

Without a GPU that is requirements/cpu.lock. torch comes first, as an index may offer a CPU build
of it or, like PyPI, the one for CUDA alone. That one runs on a CPU too, but is imported only beside
the CUDA libraries that its metadata declares: they are installed where they are needed, after their
size has been said. With an NVIDIA GPU (`--cuda`) it is SGLang with its own pins, and of the lock
the tools for tests and checks. `--installer uv` takes uv in pip's place.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from importlib.metadata import requires
from pathlib import Path
from typing import NamedTuple

LOCK = Path(__file__).with_name("cpu.lock")
ROOT = LOCK.parents[1]
LOG = Path(sys.prefix) / "set-up.log"
INSTALLERS = {
    "pip": [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"],
    "uv": ["uv", "pip", "install", "--python", sys.executable],
}
AGAIN = "mend it, and `make setup` goes on from here"


class Size(NamedTuple):
    """GB to download, GB on disk afterwards."""

    download: float
    disk: float

    def __str__(self) -> str:
        return f"{self.download:.1f} GB to download, {self.disk:.1f} GB on disk"


# What pip and du gave on Linux, x86-64; of CUDA_PINS the sum of the wheels' sizes that PyPI states,
# and on disk as much more as with the CUDA build of torch. Minutes at 100 Mbit/s and above.
CPU_BUILD, CPU_MINUTES = Size(0.8, 3.2), "2 to 5 minutes"
CUDA_BUILD, CUDA_MINUTES = Size(3.1, 6.2), "5 to 15 minutes"
LIBRARIES = Size(2.0, 2.8)
CUDA_PINS, PINS_MINUTES = Size(4.3, 9.0), "10 to 20 minutes"


def say(message: str) -> None:
    print(f"setup: {message}", flush=True)


def pinned() -> list[str]:
    """The lines `name==version` of the lock."""
    return [line for line in LOCK.read_text().splitlines() if re.match(r"[A-Za-z0-9]", line)]


def tools(lock: list[str]) -> list[str]:
    """The lines of the lock for what the extra `dev` names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = {re.split(r"[<>=!~ ;]", each)[0] for each in project["optional-dependencies"]["dev"]}
    return [line for line in lock if line.partition("==")[0].lower() in named]


def beyond_the_lock(declared: list[str], lock: list[str]) -> list[str]:
    """Requirements among `declared` that hold here and that no line of `lock` names.

    Of a CPU build of torch there are none, of a CUDA build the CUDA libraries. What both name stays
    at the lock's version. `packaging` must be installed, hence the import inside.
    """
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    known = {canonicalize_name(line.partition("==")[0]) for line in lock}
    found = []
    for text in declared:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        if canonicalize_name(wanted.name) not in known:
            found.append(text)
    return found


def package_of(line: str) -> str | None:
    """What a line of pip's names as next, from an index, a file or the environment; else None."""
    said = r"(?:Collecting|Processing|Requirement already satisfied:) (?:\S*/)?([^\s/]+)"
    found = re.match(said, line)
    return found and found[1]


def require_room(size: Size) -> None:
    """End here unless the disk has room for what is still to come, downloads included."""
    there = sum(file.stat().st_size for file in Path(sys.prefix).rglob("*") if file.is_file())
    missing = size.disk + size.download - there / 1e9
    free = shutil.disk_usage(sys.prefix).free / 1e9
    if free < missing:
        raise SystemExit(
            f"setup: {free:.1f} GB are free in {sys.prefix}, {missing:.1f} GB are needed "
            f"({size}): make room, or set up elsewhere with make setup VENV=DIR"
        )


def require_compiler() -> None:
    """End here unless Triton can build its launchers, in C (triton/runtime/build.py)."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        raise SystemExit(
            "setup: no C compiler, which Triton needs on a GPU: install gcc (Debian, Ubuntu: apt "
            f"install gcc); {AGAIN}"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise SystemExit(
            f"setup: no {header}, which Triton needs on a GPU: install Python's headers (Debian, "
            f"Ubuntu: apt install python3-dev); {AGAIN}"
        )


def install(installer: str, *arguments: str) -> None:
    """Run the installer in sight, with its progress bars."""
    if subprocess.run([*INSTALLERS[installer], *arguments]).returncode:
        raise SystemExit(f"setup: {installer} failed, its message is above; {AGAIN}")


def install_lock(total: int) -> None:
    """Run pip over the whole lock: a line for each package, all that pip says in a log."""
    seen = 0
    with (
        LOG.open("w") as log,
        subprocess.Popen(
            [*INSTALLERS["pip"], "--no-deps", "-r", str(LOCK)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as pip,
    ):
        assert pip.stdout is not None
        for line in pip.stdout:
            log.write(line)
            if package := package_of(line):
                seen += 1
                say(f"[{seen:3}/{total}] {package}")
            elif line.startswith("Installing collected packages"):
                say("unpacking them, a minute or two")
            elif line.startswith("ERROR"):
                print(line, end="", file=sys.stderr)
    if pip.returncode:
        raise SystemExit(f"setup: pip failed, see {LOG}; {AGAIN}")


def torch_says(expression: str) -> str:
    """What an expression of torch gives in a new process; ends here if torch is not imported."""
    code = f"import torch; print({expression})"
    tried = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if tried.returncode:
        reason = tried.stderr.strip().splitlines()[-1]
        raise SystemExit(
            f"setup: torch is installed but cannot be imported ({reason}); let pip find another "
            "build of it (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL), then: make clean setup"
        )
    return tried.stdout.strip()


def build_library(installer: str) -> None:
    """Build the CPU kernels, with a compiler from an index where the machine has none."""
    sys.path.insert(0, str(ROOT))
    from sglang_dspark.backends.cpu import csrc

    if not any(csrc.compilers()):
        say(f"no C++ compiler here: {csrc.ZIG} builds the CPU kernels, 0.1 GB to download")
        subprocess.run([*INSTALLERS[installer], "--quiet", csrc.ZIG])
        importlib.invalidate_caches()
    say("building the CPU kernels: seconds with g++, a minute or two with ziglang")
    try:
        csrc.build(csrc.SOURCES)
    except csrc.BuildError as error:
        say(f"they are not built, and torch multiplies, which is slower ({error}): {csrc.HOW_TO}")


def for_a_cpu(installer: str) -> None:
    lock = pinned()
    say(f"no NVIDIA GPU: SGLang for a CPU, {len(lock)} packages into {sys.prefix} by {installer}")
    say(f"with a CPU build of torch {CPU_BUILD}, {CPU_MINUTES};")
    say(f"where only its CUDA build is found, as on PyPI, {CUDA_BUILD}, {CUDA_MINUTES}")
    require_room(CPU_BUILD)
    first = [line for line in lock if line.startswith(("torch==", "packaging=="))]
    install(installer, "--no-deps", *first)
    libraries = beyond_the_lock(requires("torch") or [], lock)
    if libraries:
        say(f"this is the CUDA build of torch; the libraries it needs: {LIBRARIES}")
        require_room(CUDA_BUILD)
        quiet = ["--no-warn-conflicts"] if installer == "pip" else []
        install(installer, *quiet, *libraries)
    if installer == "pip":
        install_lock(len(lock))
    else:
        install(installer, "--no-deps", "-r", str(LOCK))
    torch_says("torch.__version__")
    install(installer, "--quiet", "--no-deps", "--no-build-isolation", "-e", str(ROOT))
    build_library(installer)


def for_a_gpu(installer: str) -> None:
    say(f"NVIDIA GPU found: SGLang with its own CUDA pins into {sys.prefix} by {installer},")
    say(f"about {CUDA_PINS}, {PINS_MINUTES}; for the CPU instead: make setup GPU=0")
    require_compiler()
    require_room(CUDA_PINS)
    install(installer, "-e", f"{ROOT}[cuda,loadtest,train]", *tools(pinned()))
    if torch_says("torch.cuda.is_available()") != "True":
        say(
            "torch cannot use the GPU, whose driver may be too old (nvidia-smi): renew it, or take "
            "the CPU by make clean demo GPU=0"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="What is behind `make setup`.")
    parser.add_argument("--installer", choices=INSTALLERS, default="pip")
    parser.add_argument("--cuda", action="store_true", help="for an NVIDIA GPU")
    given = parser.parse_args()
    (for_a_gpu if given.cuda else for_a_cpu)(given.installer)


if __name__ == "__main__":
    main()
