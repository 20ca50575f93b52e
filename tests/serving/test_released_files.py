"""Files of SGLang are compared with those of the supported release."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from sglang_dspark.serving import released_files


def test_the_installed_files_are_the_release() -> None:
    """After an upgrade: put the digest of `python -m tools.upstream_hashes` into RELEASE."""
    assert released_files.are_unchanged()


@pytest.fixture
def srt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The runtime of a small SGLang, which counts as the release."""
    folder = tmp_path / "sglang"
    (folder / "srt" / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "srt" / "one.py").write_text("VALUE = 1\n")
    (folder / "srt" / "inner" / "two.py").write_text("VALUE = 2\n")
    spec = find_spec("sglang")
    assert spec is not None
    small = type(spec)("sglang", None, is_package=True)
    small.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(released_files, "find_spec", lambda name: small)
    monkeypatch.setattr(released_files, "RELEASE", released_files.digest())
    assert released_files.are_unchanged()
    return folder / "srt"


def test_an_edited_file(srt: Path) -> None:
    (srt / "one.py").write_text("VALUE = 3\n")
    assert not released_files.are_unchanged()


def test_a_missing_file(srt: Path) -> None:
    (srt / "one.py").unlink()
    assert not released_files.are_unchanged()


def test_a_moved_and_an_added_file(srt: Path) -> None:
    shutil.move(srt / "one.py", srt / "inner")
    assert not released_files.are_unchanged()
    shutil.move(srt / "inner" / "one.py", srt)
    assert released_files.are_unchanged()
    (srt / "three.py").write_text("")
    assert not released_files.are_unchanged()


def test_no_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(released_files, "find_spec", lambda name: None)
    assert not released_files.are_unchanged()
