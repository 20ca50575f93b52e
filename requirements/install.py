"""Installs requirements/cpu.lock into the environment that runs it: `make setup` without a GPU.

torch comes first, as an index may offer a CPU build of it or, like PyPI, the one for CUDA alone.
That one runs on a CPU too, but is imported only beside the CUDA libraries that its metadata
declares: they are installed where they are needed, after their size has been said.
"""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

LOCK = Path(__file__).with_name("cpu.lock")
ROOT = LOCK.parents[1]
LOG = Path(sys.prefix) / "set-up.log"
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install"]

# Sizes that pip and du gave on Linux, x86-64; minutes at 100 Mbit/s and above.
CPU_SIZE = "0.8 GB to download, 3.2 GB on disk, 2 to 5 minutes"
CUDA_SIZE = "3.1 GB to download, 6.2 GB on disk, 5 to 15 minutes"
LIBRARIES_SIZE = "2.0 GB to download, 2.8 GB on disk"


def say(message: str) -> None:
    print(f"setup: {message}", flush=True)


def pinned() -> list[str]:
    """The lines `name==version` of the lock."""
    return [line for line in LOCK.read_text().splitlines() if re.match(r"[A-Za-z0-9]", line)]


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


def install(*arguments: str) -> None:
    """Run pip in sight, with its progress bars."""
    if subprocess.run([*PIP, *arguments]).returncode:
        raise SystemExit("setup: pip failed, its message is above")


def install_lock(total: int) -> None:
    """Run pip over the whole lock: a line for each package, all that pip says in a log."""
    seen = 0
    with (
        LOG.open("w") as log,
        subprocess.Popen(
            [*PIP, "--no-deps", "-r", str(LOCK)],
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
        raise SystemExit(f"setup: pip failed, see {LOG}")


def main() -> None:
    lock = pinned()
    say(f"no NVIDIA GPU: {len(lock)} packages; with a CPU build of torch {CPU_SIZE};")
    say(f"where pip finds only its CUDA build, as on PyPI, {CUDA_SIZE}")
    first = [line for line in lock if line.startswith(("torch==", "packaging=="))]
    install("--no-deps", *first)
    libraries = beyond_the_lock(requires("torch") or [], lock)
    if libraries:
        say(f"this is the CUDA build of torch; the libraries it needs: {LIBRARIES_SIZE}")
        install("--no-warn-conflicts", *libraries)
    install_lock(len(lock))
    tried = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, text=True)
    if tried.returncode:
        reason = tried.stderr.strip().splitlines()[-1]
        raise SystemExit(
            f"setup: torch is installed but cannot be imported ({reason}); let pip find another "
            "build of it (PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL), then: make clean setup"
        )
    install("--quiet", "--no-deps", "--no-build-isolation", "-e", str(ROOT))


if __name__ == "__main__":
    main()
