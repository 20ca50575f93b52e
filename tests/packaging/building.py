"""Wheel and sdist of this checkout, and environments that hold nothing else of ours.

Third-party packages are those of the running environment, by links: only what a package declares
and carries is tried, not the downloads.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tests.cached_compiler import cached_compiler, user_objects

ROOT = Path(__file__).resolve().parents[2]
_NOT_SOURCE = (
    *(".git", ".venv", "runs", "build", "dist", "site", "*.egg-info", "__pycache__"),
    *(".*_cache", ".hypothesis", "*.so"),
)
_BUILD = (
    "import sys; from setuptools import build_meta; "
    "print(getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2]))"
)


def build(kind: str, source: Path, out: Path) -> Path:
    """Build the `wheel` or `sdist` of a source folder as pip does; the file."""
    command = [sys.executable, "-c", _BUILD, kind, str(out)]
    environment = {**os.environ, **cached_compiler(user_objects())}
    done = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


def copy_of_the_checkout(place: Path) -> Path:
    """The sources alone: a build writes beside them, and reads what earlier ones have left."""
    return shutil.copytree(ROOT, place, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_SOURCE))


@dataclass(frozen=True)
class Installed:
    """A virtual environment with our wheel in it. home: of its user."""

    python: Path
    home: Path

    def run(
        self, *command: str, timeout: float = 300, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """A command of the environment, `dspark` or `python`, outside the checkout."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
        return subprocess.run(
            [str(self.python.with_name(command[0])), *command[1:]],
            cwd=self.home,
            env={**kept, "HOME": str(self.home), "COLUMNS": "200", **environment},
            capture_output=True,
            text=True,
            timeout=timeout,
        )


def install(wheel: Path, place: Path, without: Collection[str] = ()) -> Installed:
    """A new environment with the wheel and our third-party packages, less those in `without`."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", place / "venv"], check=True)
    installed = Installed(place / "venv" / "bin" / "python", place / "home")
    installed.home.mkdir()
    packages = _third_party(place / "packages", without)
    asked = installed.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    Path(asked.stdout.strip(), "third_party.pth").write_text(f"{packages}\n")
    done = pip(installed, "install", "--no-deps", str(wheel))
    assert done.returncode == 0, done.stderr
    return installed


def pip(installed: Installed, *command: str) -> subprocess.CompletedProcess[str]:
    """The running environment's pip, working on that one, without any index."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PIP_")}
    options = ["--isolated", "--python", str(installed.python)]
    return subprocess.run(
        [sys.executable, "-m", "pip", *options, *command, "--no-index"],
        cwd=installed.home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def _third_party(place: Path, without: Collection[str]) -> Path:
    """A folder of links to what is installed here, without this package and without `without`."""
    place.mkdir()
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        name = entry.name.partition("-")[0].removesuffix(".py")
        ours = name.startswith(("sglang_dspark", "__editable__"))
        if not ours and name not in (*without, "__pycache__") and entry.suffix != ".pth":
            (place / entry.name).symlink_to(entry)
    return place
