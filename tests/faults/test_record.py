"""The record of faults: taken at once, or in pieces of one commit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults import __main__ as record


def lines(*tests: str, lost: int = 0) -> list[dict[str, object]]:
    return [{"test": test, "lost": lost} for test in tests]


def test_a_piece_replaces_its_own_lines_and_keeps_the_others() -> None:
    earlier = lines("test_a.py::x", "test_b.py::x[1]", "test_b.py::x[2]", "test_b.py::x[3]")
    found = lines("test_b.py::x[1]", "test_b.py::new", lost=1)
    ran = {"test_b.py::x[1]", "test_b.py::new", "test_b.py::x[3]"}  # the last of them failed
    found = record.joined(earlier, found, ran)
    assert [(each["test"], each["lost"]) for each in found] == [
        ("test_a.py::x", 0),
        ("test_b.py::x[2]", 0),
        ("test_b.py::x[1]", 1),
        ("test_b.py::new", 1),
    ]


@pytest.mark.parametrize(("commit", "stays"), [("this", True), ("another", False)])
def test_only_lines_of_the_same_commit_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commit: str, stays: bool
) -> None:
    monkeypatch.setattr(record, "commit", lambda: "this")
    path = tmp_path / "faults.json"
    assert record.kept(path) == []
    outcomes = lines("test_a.py::x")
    path.write_text(json.dumps({"commit": commit, "metrics": {"faults": outcomes}}))
    assert record.kept(path) == (outcomes if stays else [])
