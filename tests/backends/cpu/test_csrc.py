"""The C++ library: which file is loaded, who builds it, what is said where nothing can."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang")

from sglang.kernels.fused_op import BaseFusedOp

from sglang_dspark.backends.cpu import csrc, fast_paths, fused_ops, linear, threads
from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend
from tests.backends.cpu.attention_world import Case, World, ragged_pass
from tests.cached_compiler import cached_compiler, user_objects

needs_compiler = pytest.mark.skipif(not any(csrc.compilers()), reason="no C++ compiler")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Sources without a library next to them, and an empty cache."""
    sources = tmp_path / "csrc"
    shutil.copytree(csrc.SOURCES, sources, ignore=shutil.ignore_patterns("*.so"))
    for name, value in cached_compiler(user_objects()).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(csrc, "SOURCES", sources)
    monkeypatch.setattr(threads, "_started", [])  # another library has threads of its own
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept = (csrc.library, csrc.operator, linear.prepare, threads.pool_library)
    for each in kept:
        each.cache_clear()
    yield tmp_path / "cache" / "sglang-dspark" / "csrc"
    for each in kept:
        each.cache_clear()


@needs_compiler
def test_it_is_built_once_into_the_cache(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = csrc.library()
    assert loaded is not None
    assert loaded._name == str(elsewhere / csrc.file_name())
    assert {path.name for path in elsewhere.iterdir()} == {csrc.file_name(), "lock"}
    csrc.library.cache_clear()
    monkeypatch.setattr(csrc, "build", None)  # a call of it would raise
    assert csrc.library() is not None


def test_the_library_next_to_the_sources_comes_first(elsewhere: Path) -> None:
    here = csrc.SOURCES / csrc.file_name()
    here.write_bytes(b"")
    assert csrc._find() == here
    assert not elsewhere.exists()


def test_other_sources_have_another_name(elsewhere: Path) -> None:
    before = csrc.file_name()
    with (csrc.SOURCES / "pool.h").open("a") as file:
        file.write("// more\n")
    assert csrc.file_name() != before


def test_without_a_compiler_torch_multiplies_and_one_line_says_so(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(csrc, "compilers", lambda: iter(()))
    with caplog.at_level(logging.WARNING):
        assert linear.prepare() is None
        assert threads.pool_library() is None
        assert threads.pool_threads(4) == 1
        assert csrc.operator("rms_norm_rows") is None
    assert caplog.messages == [
        "sglang-dspark: torch multiplies, which is slower: the C++ library of the CPU kernels is "
        f"missing: there is no C++ compiler; {csrc.HOW_TO}"
    ]
    assert linear.why_not() == f"the C++ library of the CPU kernels is missing; {csrc.HOW_TO}"
    x, weight = torch.randn(3, 32), torch.randn(48, 32)
    assert torch.equal(linear.product(x, weight), torch.nn.functional.linear(x, weight))


def test_without_a_library_sglang_norms_and_torch_attends(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(csrc, "compilers", lambda: iter(()))
    monkeypatch.setattr(fast_paths, "_logged", set())
    monkeypatch.setattr(BaseFusedOp, "_oot_forward_registry", {})
    world = World(Case((40, 3), (6, 2), heads=6, kv_heads=2, sliding=20))
    with caplog.at_level(logging.INFO):
        fused_ops.register("dspark")
        backend = DsparkCpuAttnBackend(world.runner())
    assert BaseFusedOp._oot_forward_registry == {}
    assert not backend.in_place
    assert not backend.writes_in_place
    out = world.forward(backend, ragged_pass(world))
    torch.testing.assert_close(out.double(), world.expected(), rtol=0, atol=2e-6)
    assert [line for line in caplog.messages if ": off: " in line] == [
        f"sglang-dspark: off: {path}: {csrc.why_not()}"
        for path in (
            "norms, rotary embedding and SiLU gate by one kernel each",
            "attention over float32 caches in place",
        )
    ]


@needs_compiler
def test_a_compiler_that_fails_is_passed_over(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = list(csrc.compilers())
    too_old = [sys.executable, "-c", "import sys; sys.exit('error: bad value for -march=')"]
    monkeypatch.setattr(csrc, "compilers", lambda: iter([["no-such-compiler"], too_old, *good]))
    assert csrc.build(elsewhere).name == csrc.file_name()
    assert [path.name for path in elsewhere.iterdir()] == [csrc.file_name()]
    monkeypatch.setattr(csrc, "compilers", lambda: iter([too_old]))
    with pytest.raises(csrc.BuildError, match="error: bad value for -march="):
        csrc.build(elsewhere)


def test_the_named_compiler_is_taken_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "ccache some-g++")
    assert list(csrc.compilers()) == [["ccache", "some-g++"]]


@needs_compiler
def test_processes_that_start_together_share_one_build(elsewhere: Path) -> None:
    code = (
        "from pathlib import Path; from sglang_dspark.backends.cpu import csrc;"
        f"csrc.SOURCES = Path({str(csrc.SOURCES)!r}); print(csrc.library()._name)"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=os.environ, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    said = {each.communicate(timeout=300)[0].strip() for each in both}
    assert said == {str(elsewhere / csrc.file_name())}
    assert len(list(elsewhere.glob("*.so"))) == 1


def test_it_needs_the_c_library_alone() -> None:
    """So that one wheel serves: no libstdc++ of the machine that built it."""
    loaded = csrc.library()
    if sys.platform != "linux" or loaded is None or not shutil.which("readelf"):
        pytest.skip("no library, or no readelf")
    command = ["readelf", "-d", loaded._name]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    needed = [line for line in listed.stdout.splitlines() if "(NEEDED)" in line]
    assert len(needed) == 1
    assert "[libc.so.6]" in needed[0]
