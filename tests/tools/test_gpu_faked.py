"""tools/gpu/faked: what `prepare` and `rehearse` read and write; whole runs take minutes."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dspark.benchmarks import layers
from sglang_dspark.errors import DSparkError
from sglang_dspark.models.simulated import SHAPES
from tools.gpu.faked import first as faked_first
from tools.gpu.faked import small_shapes
from tools.gpu.faked.environment import (
    PACKAGES,
    driver_functions,
    find_toolkit,
    write_stub,
)
from tools.gpu.faked.rehearse import compiled
from tools.gpu.kit import first, ladder, rounds, sampled, steps
from tools.gpu.packing.wheels import read_pins

ROOT = Path(__file__).resolve().parents[2]
FAKED = ROOT / "tools" / "gpu" / "faked"
QKNORM = "('qknorm', '128', 'true', 'bf16_t', 'true')"
FACTORY = "sglang.kernels.ops.layernorm.norm._jit_qknorm_module(head_dim=128, dtype=torch.bfloat16)"
LOG = f"""\
[2026-01-01] server starts
JIT built {QKNORM} by {FACTORY} in 6.7 s
JIT built ('speculative_tree',) by sglang.kernels.ops.speculative.tree._jit_tree_module() in 9.0 s
TRITON compiled a.b
TRITON compiled a.b
"""

needs_a_compiler = pytest.mark.skipif(
    shutil.which("cc") is None or shutil.which("nm") is None, reason="no C compiler"
)


@needs_a_compiler
def test_the_stub_has_each_function_that_a_library_lacks_of_the_driver(tmp_path: Path) -> None:
    source, library = tmp_path / "user.c", tmp_path / "user.so"
    source.write_text(
        "int cuInit(int); int cudaFree(void *); int other(void);\n"
        "int used(void) { return cuInit(0) + cudaFree(0) + other(); }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    assert driver_functions([library]) == ["cuInit"]
    write_stub([library], tmp_path / "stub")
    stub = tmp_path / "stub" / "libcuda.so.1"
    assert ctypes.CDLL(str(stub)).cuInit(0) == 0
    made = stub.stat().st_mtime_ns
    write_stub([library], tmp_path / "stub")
    assert stub.stat().st_mtime_ns == made


def test_a_parcel_without_libraries_has_no_stub(tmp_path: Path) -> None:
    with pytest.raises(DSparkError, match="no library of sgl_kernel"):
        write_stub([], tmp_path)


def test_a_toolkit_is_a_folder_with_nvcc_headers_and_libraries(tmp_path: Path) -> None:
    whole, headless = tmp_path / "whole", tmp_path / "headless"
    for folder in (whole, headless):
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "nvcc").touch()
        (folder / "lib64").mkdir()
    (whole / "include").mkdir()
    assert find_toolkit([headless, whole]) == whole
    assert find_toolkit([headless, tmp_path / "none"]) is None


def test_the_packages_are_pinned_and_none_of_them_is_sent() -> None:
    lines = [line for line in PACKAGES.read_text().splitlines() if not line.startswith("#")]
    names = {re.split("==", line)[0] for line in lines}
    assert all(re.fullmatch(r"[\w-]+==[\w.]+(; python_version .*)?", line) for line in lines)
    assert "torch==2.11.0" in lines
    assert not names & {pin.name for pin in read_pins()}


def test_a_log_gives_modules_with_factory_and_seconds_and_kernels_once() -> None:
    assert compiled(LOG) == {
        "jit": [
            {"jit": QKNORM, "factory": FACTORY, "seconds": 6.7},
            {
                "jit": "('speculative_tree',)",
                "factory": "sglang.kernels.ops.speculative.tree._jit_tree_module()",
                "seconds": 9.0,
            },
        ],
        "triton": ["a.b"],
    }


def test_small_shapes_keep_what_jit_modules_are_compiled_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = dict(SHAPES)
    monkeypatch.setattr(small_shapes, "SHAPES", shrunk := dict(SHAPES))
    monkeypatch.setattr(layers, "LAYERS", layers.LAYERS)
    small_shapes.shrink_shapes()
    for layer in layers.LAYERS:
        assert (layer.width, layer.inner, layer.experts) == (512, 256, 16)
        assert layer.top_k in (6, 8)
    assert shrunk["tiny"] == whole["tiny"]
    four = shrunk["qwen3-4b"]
    assert (four.heads, four.kv_heads, four.head_dim, four.gamma) == (32, 8, 128, 7)
    assert (four.layers, four.hidden, four.vocab) == (4, 256, 1024)
    assert small_shapes.small(whole["qwen3-4b"], vocab=5).hidden == 2560


def test_without_an_environment_python_says_how_to_prepare_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [FAKED / "python", "-c", ""],
        env={"FAKED_GPU": str(tmp_path), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"no environment in {tmp_path}: run tools/gpu/faked/prepare" in done.stderr


@needs_a_compiler
def test_prepare_names_what_is_missing_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [FAKED / "prepare", "--folder", tmp_path, "--python", "no-such-python"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "faked: no-such-python is not installed\n")


def test_the_faked_first_stage_changes_what_the_kit_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Setting a name that the kit no longer has would change nothing."""
    changed = {
        ladder: ("READY_S", "AGAIN_S"),
        rounds: ("ROUND_S",),
        sampled: ("ANSWER_S",),
        steps: ("ANSWER_S",),
        first: ("READY_S", "AGAIN_S", "_COMPILE_S", "ATTENDED", "LOADS", "TRACES", "_shared"),
    }
    for module, names in changed.items():
        for name in names:
            before = getattr(module, name)
            kept = dict(before) if isinstance(before, dict) else before
            monkeypatch.setattr(module, name, kept)
    cpu = first.LOADS["cpu"], first.TRACES["cpu"]
    monkeypatch.setattr(first, "main", lambda: 7)
    assert faked_first.main() == 7
    assert min(first.READY_S, first.AGAIN_S, ladder.READY_S, ladder.AGAIN_S) == 900.0
    assert (rounds.ROUND_S, sampled.ANSWER_S, steps.ANSWER_S) == (300.0, 600.0, 600.0)
    assert first.LOADS["cuda"][1].users == first.ATTENDED == (1, 2)
    assert (first.LOADS["cpu"], first.TRACES["cpu"]) == cpu
