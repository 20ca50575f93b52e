"""Test compiled functions on disk: read again, or compiled again if their files are invalid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sglang_dspark.common.machine_code import folder_of, kept
from sglang_dspark.errors import DSparkError


def plus_one(x: int) -> int:
    return x + 1


def start(folder: Path) -> tuple[int, int]:
    """Count the files that a process start reads, and the functions that it compiles."""
    compiled: Any = kept(plus_one, lambda: folder, nogil=True)
    assert compiled(2) == 3
    stats = compiled.stats
    return sum(stats.cache_hits.values()), sum(stats.cache_misses.values())


def test_a_second_start_reads_what_the_first_compiled(tmp_path: Path) -> None:
    assert start(tmp_path) == (0, 1)
    assert start(tmp_path) == (1, 0)


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
@pytest.mark.parametrize("content", [b"", b"garbage", b"\x80\x04."])
def test_a_broken_file_is_written_anew(
    tmp_path: Path, suffix: str, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    start(tmp_path)
    (file,) = tmp_path.rglob(f"*{suffix}")
    file.write_bytes(content)
    assert start(tmp_path) == (0, 1)
    assert caplog.text.count("is compiled again: what was kept cannot be read") == 1
    assert start(tmp_path) == (1, 0)


def test_where_nothing_can_be_written_it_is_compiled_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "a-file").write_text("")
    assert sum(start(tmp_path / "a-file" / "kernels")) == 1


def test_without_a_place_it_is_compiled_at_each_start() -> None:
    def homeless() -> Path:
        raise DSparkError("no home folder")

    compiled: Any = kept(plus_one, homeless)
    assert compiled(2) == 3
    assert sum(compiled.stats.cache_hits.values()) == 0


def test_another_text_has_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    called, caller = tmp_path / "called.py", tmp_path / "caller.py"
    called.write_text("x = 1")
    caller.write_text("y = 1")
    before = folder_of("kernels", [caller, called])
    assert before.parent == tmp_path / "sglang-dspark" / "kernels"
    assert folder_of("kernels", [caller, called]) == before
    called.write_text("x = 2")
    assert folder_of("kernels", [caller, called]) != before
