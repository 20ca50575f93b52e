"""`make setup` and `make test`: what is installed beside the lock, and that both halves run."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = ["filelock", "typing-extensions>=4.10.0", "setuptools>=77.0.3", "sympy>=1.13.3", "jinja2"]
LIBRARIES = [
    'cuda-toolkit[cublas,cudart,nvrtc]==13.0.3; platform_system == "Linux"',
    'cuda-bindings<14,>=13.0.3; platform_system == "Linux" and python_version < "3.15"',
    'nvidia-cudnn-cu13==9.20.0.48; platform_system == "Linux"',
]
NOT_HERE = ['nvidia-old; python_version < "3"', 'opt-einsum>=3.3; extra == "opt-einsum"']
OF_THE_LOCK = ['triton==3.7.1; platform_system == "Linux"']


@pytest.fixture(scope="module")
def install() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / "requirements" / "install.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_cuda_build_needs_its_libraries_and_a_cpu_build_nothing(install: ModuleType) -> None:
    lock = install.pinned()
    declared = [*SHARED, *LIBRARIES, *NOT_HERE, *OF_THE_LOCK]
    assert install.beyond_the_lock(declared, lock) == LIBRARIES
    assert install.beyond_the_lock(SHARED, lock) == []


def test_the_lock_pins_every_package_once(install: ModuleType) -> None:
    names = [line.split("==")[0].lower().replace("_", "-") for line in install.pinned()]
    assert len(names) == len(set(names))
    assert {"torch", "packaging", "sglang"} <= set(names)
    assert all(line.count("==") == 1 for line in install.pinned())


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("Collecting sglang==0.5.23 (from -r /a/cpu.lock (line 7))", "sglang==0.5.23"),
        ("Processing /a/files/anyio-4.16.0-py3-none-any.whl (from -r x)", "anyio-4.16.0"),
        ("Requirement already satisfied: torch==2.13.0 in ./lib (2.13.0+cpu)", "torch==2.13.0"),
        ("  Downloading sglang-0.5.23-cp311-cp311-manylinux_2_34_x86_64.whl (39 MB)", None),
        ("Looking in links: /a/wheels", None),
    ],
)
def test_what_pip_says_of_a_package_is_counted(
    install: ModuleType, line: str, name: str | None
) -> None:
    found = install.package_of(line)
    assert (found or "").startswith(name or "")
    assert (found is None) is (name is None)


def test_without_a_compiler_set_up_says_what_that_costs(install: ModuleType) -> None:
    """And goes on; here no index has the compiler either."""
    if importlib.util.find_spec("ziglang"):
        pytest.skip("there is a compiler: ziglang")
    path = Path(str(install.__file__)).parent
    done = subprocess.run(
        [sys.executable, "-c", "import install; install.build_library('pip')"],
        cwd=path,
        env={"PATH": "", "HOME": os.environ["HOME"], "PIP_NO_INDEX": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("setup: no C++ compiler here: ziglang==")
    assert lines[-1].startswith("setup: they are not built, and torch multiplies, which is slower")
    assert "there is no C++ compiler" in lines[-1]


@pytest.mark.slow
def test_tests_of_a_group_share_a_process(tmp_path: Path) -> None:
    """By the runner of `make test`: servers that tests share would otherwise stand twice."""
    for group in ("one", "two"):
        (tmp_path / f"test_{group}.py").write_text(
            "import os, pytest\n"
            f"pytestmark = pytest.mark.xdist_group('{group}')\n"
            "@pytest.mark.parametrize('number', range(8))\n"
            f"def test_it(number): open('{group}-' + str(os.getpid()), 'a').close()\n"
        )
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert sorted(path.name.split("-")[0] for path in tmp_path.glob("*-*")) == ["one", "two"]


@pytest.mark.parametrize("codes", [(0, 0), (1, 0), (0, 1), (1, 1)])
def test_both_halves_of_the_tests_run_and_are_reported(
    tmp_path: Path, codes: tuple[int, int]
) -> None:
    """`make test` as it is; the test runner only prints its arguments."""
    half = tmp_path / "half"
    status = 'case "$*" in *not*) exit {};; *) exit {};; esac'.format(*codes)
    half.write_text(f'#!/bin/sh\necho "half: $*"\n{status}\n')
    half.chmod(0o755)
    (tmp_path / ".set-up").touch()
    done = subprocess.run(
        ["make", "test", "ARGS=", f"VENV={tmp_path}", f"HALF={shlex.quote(str(half))}"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("MAKE")},
        capture_output=True,
        text=True,
    )
    words = ["failed" if code else "passed" for code in codes]
    assert done.stdout.splitlines() == [
        "half: -n 3 -m not server",
        "half: -n 2 -m server",
        f"test: without servers {words[0]}, with servers {words[1]}",
    ]
    assert (done.returncode == 0) is (codes == (0, 0))
