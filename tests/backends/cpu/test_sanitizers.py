"""The C++ library under sanitizers: no data race, no bad access, nothing undefined."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from sglang_dspark.backends.cpu import csrc

DRIVER = Path(__file__).with_name("hammer.cpp")
DRAFTING = Path(__file__).with_name("draft_operators.cpp")
KINDS = ("thread", "address,undefined")
pytestmark = pytest.mark.skipif(
    csrc.library() is None, reason="no C++ compiler and no library of csrc/"
)


def compiled(kind: str, sources: Path, place: Path, program: Path = DRIVER) -> list[str]:
    """Build driver and library with a sanitizer; the command. Skips the test where the compiler
    has none."""
    compiler = next(csrc.compilers(), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    options = [f"-fsanitize={kind}", "-fno-sanitize-recover=all", "-O1", "-g", "-pthread"]
    empty = place / "empty.cpp"
    empty.write_text("int main() {}")
    tried = subprocess.run([*compiler, *options, empty, "-o", place / "empty"], capture_output=True)
    if tried.returncode or subprocess.run([place / "empty"], capture_output=True).returncode:
        pytest.skip(f"{compiler[-1]} has no -fsanitize={kind} that runs here")
    # The driver finds the headers by its own place.
    driver = place / "tests" / "backends" / "cpu" / program.name
    driver.parent.mkdir(parents=True)
    shutil.copy(program, driver)
    objects, running = [], []
    for number, (source, flags) in enumerate((*csrc.OBJECTS, (str(driver), ()))):
        objects.append(str(place / f"{number}.o"))
        command = [*compiler, *csrc.FLAGS, *flags, *options, "-c", sources / source]
        running.append(subprocess.Popen([*command, "-o", objects[-1]]))
    assert [each.wait() for each in running] == [0] * len(objects)
    linked = place / "hammer"
    subprocess.run([*compiler, *options, *objects, "-o", linked], check=True)
    return [str(linked)]


def copy_of_sources(place: Path) -> Path:
    return shutil.copytree(csrc.SOURCES, place / "sglang_dspark" / "backends" / "cpu" / "csrc")


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    quiet = {k: v for k, v in os.environ.items() if not k.endswith("SAN_OPTIONS")}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=quiet)


@pytest.mark.parametrize("kind", KINDS)
def test_jobs_and_products_are_clean(kind: str, tmp_path: Path) -> None:
    done = run(compiled(kind, copy_of_sources(tmp_path), tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout == "good\n"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("context.cpp", "", ""),
        ("context.cpp", "w.width * sizeof *x", "(w.width + 1) * sizeof *x"),
    ],
)
def test_operators_of_drafting_are_clean_and_faults_are_found(
    file: str, old: str, new: str, tmp_path: Path
) -> None:
    sources = copy_of_sources(tmp_path)
    text = (sources / file).read_text()
    assert old in text
    (sources / file).write_text(text.replace(old, new) if old else text)
    done = run(compiled("address,undefined", sources, tmp_path, DRAFTING))
    if not old:
        assert (done.returncode, done.stdout, done.stderr) == (0, "good\n", "")
    else:
        assert done.returncode != 0
        assert "buffer-overflow" in done.stderr


@pytest.mark.parametrize(
    ("kind", "file", "old", "new", "named"),
    [
        (
            "thread",
            "pool.cpp",
            "  done.fetch_add(1, std::memory_order_acq_rel);",
            "  done.fetch_add(1, std::memory_order_relaxed);",
            "data race",
        ),
        (
            "address,undefined",
            "matmul.cpp",
            "aligned_alloc(kLine, rows * stride)",
            "aligned_alloc(kLine, (rows - 1) * stride)",
            "heap-buffer-overflow",
        ),
        (
            "address,undefined",
            "attention.cpp",
            "item.rows() * (item.padded + 1)",
            "item.rows() * item.padded",
            "heap-buffer-overflow",
        ),
        (
            "thread",
            "attention.cpp",
            "  float *scratch = nullptr;",
            "  static float *scratch = nullptr;",
            "data race",
        ),
    ],
)
def test_a_fault_is_found(
    kind: str, file: str, old: str, new: str, named: str, tmp_path: Path
) -> None:
    """Plant one, so that a clean run above means something."""
    sources = copy_of_sources(tmp_path)
    text = (sources / file).read_text()
    assert text.count(old) == 1
    (sources / file).write_text(text.replace(old, new))
    done = run(compiled(kind, sources, tmp_path))
    assert done.returncode != 0
    assert named in done.stderr
