"""The C++ library under sanitizers: no data race, no bad access, nothing undefined."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from sglang_dspark.backends.cpu import csrc
from tests.cached_compiler import cached_compiler, user_objects

HERE = Path(__file__).parent
JOBS, DRAFTING = "hammer.cpp", "draft_operators.cpp"  # programs that drive the library
KINDS = ("thread", "address,undefined")
# One process: both libraries are built once for all tests.
pytestmark = [
    pytest.mark.xdist_group("sanitizers"),
    pytest.mark.skipif(csrc.library() is None, reason="no C++ compiler and no library of csrc/"),
]


@dataclass(frozen=True)
class Build:
    """The library's objects under a sanitizer, by number in csrc.OBJECTS, and the drivers'."""

    compiler: list[str]
    options: list[str]  # the sanitizer's; behind the library's own, which optimise more
    objects: dict[int, Path]
    drivers: dict[str, Path]

    def program(self, driver: str, replaced: dict[int, Path], linked: Path) -> list[str]:
        """Link a driver with the objects, some of them replaced; the command that runs it."""
        objects = [*(self.objects | replaced).values(), self.drivers[driver]]
        line = [*self.compiler, *self.options, *objects, "-o", linked]
        subprocess.run(line, check=True)
        return [str(linked)]


def compiled(
    compiler: list[str], options: list[str], sources: Path, files: Sequence[str], place: Path
) -> dict[int, Path]:
    """Compile the objects of these sources, by number in csrc.OBJECTS."""
    objects, running = {}, []
    for number, (source, flags) in enumerate(csrc.OBJECTS):
        if source in files:
            objects[number] = place / f"{number}.o"
            line = [*compiler, *csrc.FLAGS, *flags, *options, "-c", sources / source]
            running.append(subprocess.Popen([*line, "-o", objects[number]]))
    assert running
    assert [each.wait() for each in running] == [0] * len(running)
    return objects


def copy_of_sources(place: Path) -> Path:
    return shutil.copytree(csrc.SOURCES, place / "sglang_dspark" / "backends" / "cpu" / "csrc")


def built(kind: str, place: Path) -> Build:
    """Build the library as it is; skip the test where the compiler has no such sanitizer."""
    compiler = shlex.split(cached_compiler(user_objects()).get("CXX", ""))
    if not compiler:
        pytest.skip("no C++ compiler")
    options = [f"-fsanitize={kind}", "-fno-sanitize-recover=all", "-O1", "-g", "-pthread"]
    empty = place / "empty.cpp"
    empty.write_text("int main() {}")
    tried = subprocess.run([*compiler, *options, empty, "-o", place / "empty"], capture_output=True)
    if tried.returncode or subprocess.run([place / "empty"], capture_output=True).returncode:
        pytest.skip(f"{compiler[-1]} has no -fsanitize={kind} that runs here")
    sources = copy_of_sources(place)
    objects = compiled(compiler, options, sources, [source for source, _ in csrc.OBJECTS], place)
    drivers = {}
    for name in (JOBS, DRAFTING):
        # A driver finds the headers by its own place.
        driver = place / "tests" / "backends" / "cpu" / name
        driver.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(HERE / name, driver)
        drivers[name] = place / f"{name}.o"
        # Not from the cache, which knows the headers next to a source only.
        line = [*next(csrc.compilers()), *csrc.FLAGS, *options, "-c", driver, "-o", drivers[name]]
        subprocess.run(line, check=True)
    return Build(compiler, options, objects, drivers)


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Build]:
    """The clean library of a sanitizer, built when first asked for."""
    return cache(lambda kind: built(kind, tmp_path_factory.mktemp("sanitized")))


def with_fault(made: Build, file: str, old: str, new: str, driver: str, place: Path) -> list[str]:
    """A program of the library with one text of a source replaced."""
    sources = copy_of_sources(place)
    text = (sources / file).read_text()
    assert text.count(old) == 1
    (sources / file).write_text(text.replace(old, new))
    replaced = compiled(made.compiler, made.options, sources, [file], place)
    return made.program(driver, replaced, place / "faulty")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    quiet = {k: v for k, v in os.environ.items() if not k.endswith("SAN_OPTIONS")}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=quiet)


@pytest.mark.parametrize(
    ("kind", "driver"), [*((kind, JOBS) for kind in KINDS), ("address,undefined", DRAFTING)]
)
def test_the_library_is_clean(
    build: Callable[[str], Build], kind: str, driver: str, tmp_path: Path
) -> None:
    done = run(build(kind).program(driver, {}, tmp_path / "clean"))
    assert (done.returncode, done.stdout, done.stderr) == (0, "good\n", ""), done.stderr[-3000:]


@pytest.mark.parametrize(
    ("driver", "kind", "file", "old", "new", "named"),
    [
        (
            DRAFTING,
            "address,undefined",
            "context.cpp",
            "w.width * sizeof *x",
            "(w.width + 1) * sizeof *x",
            "buffer-overflow",
        ),
        (
            JOBS,
            "thread",
            "pool.cpp",
            "  done.fetch_add(1, std::memory_order_acq_rel);",
            "  done.fetch_add(1, std::memory_order_relaxed);",
            "data race",
        ),
        pytest.param(
            JOBS,
            "address,undefined",
            "matmul.cpp",
            "aligned_alloc(kLine, rows * stride)",
            "aligned_alloc(kLine, (rows - 1) * stride)",
            "heap-buffer-overflow",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            JOBS,
            "address,undefined",
            "attention.cpp",
            "item.rows() * (item.padded + 1)",
            "item.rows() * item.padded",
            "heap-buffer-overflow",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            JOBS,
            "thread",
            "attention.cpp",
            "  float *scratch = nullptr;",
            "  static float *scratch = nullptr;",
            "data race",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_fault_is_found(
    build: Callable[[str], Build],
    driver: str,
    kind: str,
    file: str,
    old: str,
    new: str,
    named: str,
    tmp_path: Path,
) -> None:
    """Plant one, so that a clean run above means something."""
    done = run(with_fault(build(kind), file, old, new, driver, tmp_path))
    assert done.returncode != 0
    assert named in done.stderr
