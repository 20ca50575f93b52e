"""Archives of a GPU call: parts that fit, unpack alone and come back."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from tools.gpu.kit import archive
from tools.gpu.kit.archive import CACHES, LOGS, pack_folder, unpack_parts


def filled(folder: Path, sizes: dict[str, int]) -> Path:
    """A folder of files that cannot be compressed."""
    for name, size in sizes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(os.urandom(size))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_folder_comes_back_as_it_was(tmp_path: Path) -> None:
    logs = filled(tmp_path / "logs", {"dspark.log": 5000, "rung-0/dspark.log": 10, "empty": 0})
    [part] = pack_folder(logs, tmp_path / "out", LOGS, pytest.fail)
    assert part.name == "logs-1.tar.xz"
    assert unpack_parts(tmp_path / "out", LOGS, tmp_path / "back") == []
    assert contents(tmp_path / "back") == contents(logs)
    assert pack_folder(tmp_path / "none", tmp_path / "out", CACHES, pytest.fail) == []


def test_parts_keep_to_their_size_and_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "PART_BYTES", 400_000)
    monkeypatch.setattr(archive, "_SLACK", 100_000)
    sizes = {f"t{number}.json.gz": 150_000 + number for number in range(6)}
    logs = filled(tmp_path / "logs", {**sizes, "small.log": 9})
    said: list[str] = []
    parts = pack_folder(logs, tmp_path / "out", LOGS, said.append)
    assert len(parts) == archive.PARTS[LOGS] == 2
    assert all(part.stat().st_size <= 400_000 for part in parts)
    with tarfile.open(parts[0]) as first:
        assert "small.log" in first.getnames(), "logs before traces"
    kept = []
    for part in parts:
        with tarfile.open(part) as opened:
            kept += opened.getnames()
    left = len(sizes) + 1 - len(kept)
    assert left > 0
    assert said == [f"logs: {left} files do not fit, the first is t{6 - left}.json.gz"]


def test_a_cache_keeps_what_a_hit_reads(tmp_path: Path) -> None:
    names = ["k/a.cubin", "k/a.json", "k/__grp__a.json", "k/a.ptx", "k/a.ttir", "m/m.so", "m/m.o"]
    caches = filled(tmp_path / "caches", dict.fromkeys(names, 20))
    pack_folder(caches, tmp_path / "out", CACHES, pytest.fail)
    unpack_parts(tmp_path / "out", CACHES, tmp_path / "back")
    assert set(contents(tmp_path / "back")) == {
        "k/a.cubin", "k/a.json", "k/__grp__a.json", "m/m.so"
    }  # fmt: skip


def test_a_damaged_part_is_one_line_and_the_others_are_used(tmp_path: Path) -> None:
    pack_folder(filled(tmp_path / "logs", {"a": 50_000}), tmp_path, LOGS, pytest.fail)
    whole = (tmp_path / "logs-1.tar.xz").read_bytes()
    (tmp_path / "logs-2.tar.xz").write_bytes(whole[: len(whole) // 2])
    [line] = unpack_parts(tmp_path, LOGS, tmp_path / "back")
    assert line.startswith("logs-2.tar.xz is damaged (")
    assert (tmp_path / "back" / "a").stat().st_size == 50_000


def test_a_part_cannot_write_outside_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    with tarfile.open(tmp_path / "caches-1.tar.xz", "w:xz") as made:
        made.add(tmp_path / "x", "../outside")
    [line] = unpack_parts(tmp_path, CACHES, tmp_path / "home" / "caches")
    assert "damaged" in line
    assert not (tmp_path / "home" / "outside").exists()
