"""A copy of the source that faults are put into, and runs of pytest on it.

An editable install finds some of our packages by a map of absolute paths. In the copy they stand as
links inside of `sglang_dspark`, and PYTHONPATH names the copy first, so every process that a test
starts imports the copy as well. `prove` makes sure of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from sglang_dspark.errors import DSparkError
from sglang_dspark.paths import cache_root
from tests.mutants.mutant import Mutant
from tests.mutants.report import REPORT_VARIABLE

ROOT = Path(__file__).resolve().parents[2]
LINKED = (".safetensors", ".pt")  # weights: nothing is changed in them
TIMEOUT_S = 900.0  # for tests without servers; a fault may make a loop endless
FIRST_LINE = "from __future__ import annotations\n"
CANARIES = (
    "sglang_dspark/verify/greedy.py",
    "kernels/__init__.py",
    "loadtest/sweep/sla.py",
    "patches/seam.py",
)


@dataclass(frozen=True)
class Ran:
    """status: pytest's, None when it had to be ended. failed: node ids, in order. passed: how many
    tests did. output: its last lines."""

    status: int | None
    failed: tuple[str, ...]
    passed: int
    output: str


class Tree:
    """A copy of all that git knows or would add; one user at a time."""

    def __init__(self, folder: Path) -> None:
        """folder: an empty one, absolute."""
        self.folder = folder / "tree"
        self._report = folder / "report.json"
        self._cache = folder / "cache"
        for name in _files():
            self._place(name)
        for package, source in _packages().items():
            parent, _, child = package.partition(".")
            if child:
                (self.folder / parent / child).symlink_to(self.folder / source)
        (self._cache / "sglang-dspark").mkdir(parents=True)
        (self._cache / "sglang-dspark" / "models").symlink_to(
            cache_root() / "sglang-dspark" / "models"
        )

    def _place(self, name: str) -> None:
        source, target = ROOT / name, self.folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix in LINKED:
            target.symlink_to(source.resolve())
        else:
            shutil.copy2(source, target)

    def prove(self) -> None:
        """Raises DSparkError unless processes of this tree import the copy, of every root."""
        for file in CANARIES:
            text = (self.folder / file).read_text(encoding="utf-8")
            line = FIRST_LINE if FIRST_LINE in text else text
            canary = text.replace(line, f"{line}\nraise RuntimeError('canary')\n")
            parts = Path(file).with_suffix("").parts
            module = ".".join(parts if parts[0] == "sglang_dspark" else ("sglang_dspark", *parts))
            with self.with_text(file, canary):
                done = subprocess.run(
                    [sys.executable, "-c", f"import {module.removesuffix('.__init__')}"],
                    cwd=self.folder.parent,
                    env=self.environment(),
                    capture_output=True,
                    text=True,
                )
            if "RuntimeError: canary" not in done.stderr:
                raise DSparkError(
                    f"a fault in the copy's {file} is not what runs; is an install of this package "
                    "in front of PYTHONPATH?"
                )

    @contextlib.contextmanager
    def with_text(self, name: str, text: str) -> Iterator[None]:
        """Exchange a file's text; afterwards it is as it was, its time of change too."""
        file = self.folder / name
        before, times = file.read_bytes(), file.stat()
        file.write_text(text, encoding="utf-8")
        # Byte code is identified by seconds and size: no fault may look like the original.
        os.utime(file, (times.st_atime, times.st_mtime + 10))
        try:
            yield
        finally:
            file.write_bytes(before)
            os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))

    def with_fault(self, mutant: Mutant) -> contextlib.AbstractContextManager[None]:
        """Put a mutant in force."""
        text = (self.folder / mutant.file).read_text(encoding="utf-8")
        return self.with_text(mutant.file, mutant.applied(text))

    def pytest(self, tests: Sequence[str], *options: str, timeout_s: float = TIMEOUT_S) -> Ran:
        """Run tests of the copy. Raises DSparkError if anything but the copy was imported."""
        self._report.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.report"]
        command += ["-p", "no:cacheprovider", *options, *tests]
        with subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            try:
                output = process.communicate(timeout=timeout_s)[0]
            except subprocess.TimeoutExpired:
                _end(process.pid)
                return Ran(None, (), 0, "")
        return self._ran(process.returncode, output)

    def _ran(self, status: int, output: str) -> Ran:
        end = "\n".join(output.splitlines()[-30:])
        if not self._report.is_file():
            return Ran(status, (), 0, end)
        told = json.loads(self._report.read_text(encoding="utf-8"))
        if told["foreign"]:
            raise DSparkError(f"not the copy was imported, but {told['foreign'][0]}")
        return Ran(status, tuple(told["failed"]), told["passed"], end)

    def environment(self) -> dict[str, str]:
        """Variables under which a process runs the copy and reports to this tree."""
        return os.environ | {
            "PYTHONPATH": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "XDG_CACHE_HOME": str(self._cache),
            "OMP_NUM_THREADS": "1",
            REPORT_VARIABLE: str(self._report),
        }


def _end(process: int) -> None:
    """Kill a process and all that it has started, servers too."""
    root = psutil.Process(process)
    for each in (*root.children(recursive=True), root):
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def _files() -> list[str]:
    """List all files that git tracks, and new ones that it does not ignore."""
    done = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise DSparkError(f"git cannot list the files of {ROOT}: run this in a clone")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).is_file()]


def _packages() -> dict[str, str]:
    """Our packages that do not stand where their names say: name -> folder."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return dict(project["tool"]["setuptools"]["package-dir"])
