"""`make setup` itself, in a copy of the checkout: a lock of few packages, an index of our own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.cached_compiler import cached_compiler, user_objects
from tests.tools import indexes

ROOT = Path(__file__).resolve().parents[2]
LOCKED = dict(
    line.split("==")
    for line in (ROOT / "requirements" / "cpu.lock").read_text().splitlines()
    if "==" in line and not line.startswith("#")
)
SMALL_LOCK = ("torch", "packaging", "setuptools")
TORCH = f"""
__version__ = "{LOCKED["torch"]}+cpu"
class cuda:
    is_available = staticmethod(lambda: False)
"""
SYSTEM = ("make", "sh", "rm", "touch", "grep", "test", "echo")


def uv() -> str | None:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.is_file() else shutil.which("uv")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real wheels of what builds ours, empty ones of all else that is declared."""
    folder = tmp_path_factory.mktemp("wheels")
    for name in ("pip", "packaging", "setuptools"):
        indexes.installed(folder, name)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = project["dependencies"] + extras["cuda"] + extras["loadtest"] + extras["train"]
    locked = {re.sub("[-_.]+", "-", name).lower(): v for name, v in LOCKED.items()}
    for name in {Requirement(text).name for text in declared + extras["dev"]} - {*SMALL_LOCK}:
        indexes.stand_in(folder, name, locked[name])
    indexes.stand_in(folder, "torch", LOCKED["torch"], TORCH)
    return folder


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the files that set-up reads, with a lock of three packages and sizes of 0.3 GB."""
    place = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("*.safetensors", "__pycache__")
    for name in ("sglang_dspark", "kernels", "loadtest", "patches", "configs", "drafters"):
        shutil.copytree(ROOT / name, place / name, symlinks=True, ignore=ignored)
    for name in ("Makefile", "README.md", "LICENSE", "MANIFEST.in", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, place)
    shutil.copytree(ROOT / "requirements", place / "requirements", ignore=ignored)
    script = place / "requirements" / "install.py"
    sized, count = re.subn(r"\bSize\([\d., ]+\)", "Size(0.1, 0.2)", script.read_text())
    assert count == 4, "the sizes of requirements/install.py are written another way"
    script.write_text(sized)
    few = [f"{name}=={LOCKED[name]}\n" for name in SMALL_LOCK]
    (place / "requirements" / "cpu.lock").write_text("# three\n" + "".join(few))
    return place


def make(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`make` in the copy, with nothing of this machine's settings of pip and uv."""
    foreign = ("PIP_", "UV_", "MAKE", "PYTHON", "VIRTUAL_ENV")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
    own = {"HOME": str(checkout.parent), "PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1"}
    if "CC" not in environment:  # a test that names one has no C++ compiler on PATH
        own |= cached_compiler(user_objects())
    return subprocess.run(
        ["make", *arguments],
        cwd=checkout,
        env={**kept, **own, "NO_PROXY": "127.0.0.1", **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def add_to_lock(checkout: Path, name: str) -> None:
    """A stamp is made older by a second: some file systems' clocks are coarse."""
    with (checkout / "requirements" / "cpu.lock").open("a") as lock:
        lock.write(f"{name}=={LOCKED[name]}\n")
    stamp = checkout / ".venv" / ".set-up"
    if stamp.exists():
        before = stamp.stat().st_mtime - 1
        os.utime(stamp, (before, before))


def from_folder(wheels: Path) -> dict[str, str]:
    places = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels)}
    return {**places, "UV_NO_INDEX": "1", "UV_FIND_LINKS": str(wheels)}


def only(folder: Path, *commands: str) -> str:
    """A PATH with these commands, and nothing else."""
    folder.mkdir()
    for name in commands:
        found = shutil.which(name)
        assert found, name
        (folder / name).symlink_to(found)
    return str(folder)


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_set_up_says_its_size_first_and_nothing_again(
    checkout: Path, wheels: Path, installer: str, python: str
) -> None:
    """Over an environment that an earlier run left half-made."""
    if installer == "uv" and uv() is None:
        pytest.skip("uv is not installed")
    found = f"python{python}"
    if subprocess.run(["sh", "-c", f"{found} -c ''"], capture_output=True).returncode:
        pytest.skip(f"no {found} here")
    executable(checkout / ".venv" / "bin" / "python", "exit 1")
    places = from_folder(wheels)
    if installer == "uv":
        places["PATH"] = f"{Path(str(uv())).parent}:{os.environ['PATH']}"
    arguments = ("setup", "GPU=0", f"PYTHON={found}", f"INSTALLER={installer}")
    done = make(checkout, *arguments, **places)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    assert said[0].startswith("setup: no NVIDIA GPU: SGLang for a CPU, 3 packages into ")
    assert said[0].endswith(f" by {installer}")
    assert re.search(r"[\d.]+ GB to download, [\d.]+ GB on disk, \d+ to \d+ minutes", said[1])
    assert said[-1] == "setup: done"
    code = "import sys, torch, sglang_dspark as d; print(*sys.version_info[:2], d.__file__)"
    inside = [str(checkout / ".venv" / "bin" / "python"), "-c", code]
    tried = subprocess.run(inside, cwd=checkout.parent, capture_output=True, text=True)
    major, minor, file = tried.stdout.split()
    assert f"{major}.{minor}" == python
    assert Path(file).parent == checkout / "sglang_dspark"
    again = make(checkout, *arguments, **places)
    assert "setup:" not in again.stdout
    assert again.returncode == 0


def test_a_download_that_is_cut_leaves_no_stamp_and_the_next_run_goes_on(
    checkout: Path, wheels: Path
) -> None:
    stamp = checkout / ".venv" / ".set-up"
    with indexes.served(wheels, f"setuptools-{LOCKED['setuptools']}-py3-none-any.whl") as url:
        cut = make(
            checkout,
            "setup",
            "GPU=0",
            f"PYTHON={sys.executable}",
            PIP_INDEX_URL=url,
            PIP_RETRIES="0",
        )
    assert cut.returncode != 0
    assert "setup: pip failed, see " in cut.stderr
    assert "Traceback" not in cut.stdout + cut.stderr
    assert not stamp.exists()
    repaired = make(checkout, "setup", "GPU=0", **from_folder(wheels))
    assert repaired.returncode == 0, repaired.stdout + repaired.stderr
    assert stamp.exists()
    add_to_lock(checkout, "matplotlib")  # what is set up is now too little
    assert make(checkout, "setup", "GPU=0", PIP_NO_INDEX="1").returncode
    assert not stamp.exists()


def test_without_a_python_that_fits_one_line_says_so(checkout: Path, tmp_path: Path) -> None:
    path = only(tmp_path / "bin", *SYSTEM)
    executable(tmp_path / "bin" / "python3", "exit 1")  # another version
    done = make(checkout, "demo", PATH=path)
    wanted = "setup: no Python 3.11 or 3.12 found; name one: make setup PYTHON=..."
    assert done.stdout.splitlines() == [wanted]
    named = make(checkout, "setup", f"PYTHON={tmp_path}/bin/python3", PATH=path)
    assert named.stdout.splitlines() == [
        wanted.replace("found", f"in {tmp_path}/bin/python3 found")
    ]
    assert done.returncode
    assert named.returncode
    assert not (checkout / ".venv").exists()


@pytest.mark.parametrize("installer", ["uv", "conda"])
def test_an_installer_that_is_not_here_is_named(
    checkout: Path, tmp_path: Path, installer: str
) -> None:
    done = make(checkout, "setup", f"INSTALLER={installer}", PATH=only(tmp_path / "bin", *SYSTEM))
    line = f"setup: no installer {installer} here; take INSTALLER=pip, or install uv"
    assert done.stdout.splitlines() == [line]
    assert done.returncode


@pytest.mark.parametrize(("options", "needed"), [((), "4.0"), (("--cuda",), "13.3")])
def test_a_disk_too_small_is_refused_before_anything_is_fetched(
    tmp_path: Path, options: tuple[str, ...], needed: str
) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "new"], check=True)
    script = str(ROOT / "requirements" / "install.py")
    code = (
        "import runpy, shutil, subprocess, sys, types\n"
        "shutil.disk_usage = lambda place: types.SimpleNamespace(free=10**9)\n"
        f"sys.argv = [{script!r}, *{options!r}]\n"
        f"runpy.run_path({script!r}, run_name='__main__')\n"
    )
    python = tmp_path / "new" / "bin" / "python"
    done = subprocess.run(
        [python, "-c", code], env={**os.environ, "CC": "cc"}, capture_output=True, text=True
    )
    place = re.escape(str(tmp_path / "new"))
    assert re.fullmatch(
        rf"setup: 1\.0 GB are free in {place}, {needed} GB are needed \(.*\): make room, .*\n",
        done.stderr,
    ), done.stderr
    assert done.returncode == 1


def with_a_gpu(folder: Path, *commands: str) -> str:
    """A PATH where `nvidia-smi` lists one GPU."""
    path = only(folder, *SYSTEM, *commands)
    executable(folder / "nvidia-smi", "echo 'GPU 0: NVIDIA (UUID: GPU-0)'")
    return path


def test_with_a_gpu_it_is_sglang_with_its_own_pins(
    checkout: Path, wheels: Path, tmp_path: Path
) -> None:
    """And what our commands and tests need; the driver here is too old for the torch of it."""
    add_to_lock(checkout, "pytest")
    path = with_a_gpu(tmp_path / "bin")
    places = {"PATH": path, "CC": "cc", **from_folder(wheels)}
    done = make(checkout, "setup", f"PYTHON={sys.executable}", **places)
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("setup: ")]
    assert said[0].startswith("setup: NVIDIA GPU found: SGLang with its own CUDA pins into ")
    assert re.search(r"[\d.]+ GB to download, [\d.]+ GB on disk, \d+ to \d+ minutes", said[1])
    assert "setup: torch cannot use the GPU" in said[2]
    python = str(checkout / ".venv" / "bin" / "python")
    listed = subprocess.run(
        [python, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True
    ).stdout
    for name in ("sglang", "pytest", "locust", "matplotlib"):
        assert f"{name}=={LOCKED[name]}\n" in listed
    assert "sglang-dspark==" in listed


def test_with_a_gpu_and_no_compiler_one_line_says_so(checkout: Path, tmp_path: Path) -> None:
    path = with_a_gpu(tmp_path / "bin")
    done = make(checkout, "setup", f"PYTHON={sys.executable}", PATH=path)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("setup: ")]
    assert line.startswith("setup: no C compiler, which Triton needs on a GPU: install gcc")
    assert done.returncode
    assert not (checkout / ".venv" / ".set-up").exists()
