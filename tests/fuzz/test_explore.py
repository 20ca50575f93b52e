"""Test that the fuzz reports readers and writers with a known fault, with a small case."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sglang_dspark.common.files import load_json, reading
from sglang_dspark.errors import DSparkError
from tests.fuzz import guards
from tests.fuzz.checkpoints import Explodes
from tests.fuzz.documents import JSON, broken, yaml_dialect
from tests.fuzz.explore import Family, Tally, explore
from tests.fuzz.files import SENTINEL, Reading
from tests.fuzz.writers import Cut, Writer, Writing

DOCUMENT = {"threads": 2, "name": "a", "rows": [1, 2.5]}


def found(
    folder: Path,
    read: Callable[[Path], object],
    cases: int = 400,
    *,
    in_yaml: bool = False,
    shrinks: bool = False,
    number: int = 0,
) -> Tally:
    dialect = yaml_dialect(str(folder / SENTINEL), block=True) if in_yaml else JSON
    check = Reading(folder, "a.file", read)
    family = Family("a", "a", broken(DOCUMENT, dialect), check, shrinks=shrinks)
    return explore(family, cases, number)


def whole(path: Path) -> Any:
    with reading(path, "file", "fix it"):
        return load_json(path)


def test_a_reader_without_a_fault(tmp_path: Path) -> None:
    tally = found(tmp_path, whole)
    assert not tally.findings
    assert tally.cases == 400
    assert tally.refused > 100
    assert tally.accepted > 100


def trusting(path: Path) -> None:
    """Takes a number for granted."""
    value = whole(path)
    if isinstance(value, dict) and isinstance(value.get("rows"), list):
        sum(value["rows"])


def bare(path: Path) -> None:
    json.loads(path.read_text())


def nameless(path: Path) -> None:
    try:
        whole(path)
    except DSparkError:
        raise DSparkError("a file is wrong") from None


def long(path: Path) -> None:
    text = path.read_text(errors="replace")
    if len(text) > 1000:
        raise DSparkError(f"{path}: {text}")


def littering(path: Path) -> None:
    whole(path)
    path.with_name("cache").write_text("x")


@pytest.mark.parametrize("read", [trusting, bare, nameless, long, littering])
def test_a_reader_with_a_fault(tmp_path: Path, read: Callable[[Path], object]) -> None:
    assert found(tmp_path, read).findings


def test_a_finding_is_made_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fuzz.explore.SHRINK_S", 300.0)
    (finding,) = found(tmp_path, trusting, 2000, shrinks=True).findings.values()
    assert len(finding.smallest) < 60
    assert "unsupported operand" in finding.said


def test_yaml_that_executes(tmp_path: Path) -> None:
    """Of 500 files some three execute something, and now and then none: the cases hang on what
    hypothesis finds in the modules that are loaded."""

    def read(path: Path) -> None:
        try:
            yaml.load(path.read_text(), Loader=yaml.UnsafeLoader)
        except Exception as error:
            raise DSparkError(f"{path}: {type(error).__name__}") from None

    def is_seen(number: int) -> bool:
        tally = found(tmp_path, read, 500, in_yaml=True, number=number)
        return any("Forbidden" in each.said for each in tally.findings.values())

    assert any(is_seen(number) for number in range(12))


@pytest.mark.parametrize("load", [pickle.loads, lambda content: pickle.Unpickler(content).load()])
def test_pickles_are_not_loaded(tmp_path: Path, load: Callable[[bytes], object]) -> None:
    content = pickle.dumps(Explodes(str(tmp_path / "made")))
    with pytest.raises(guards.Forbidden, match="pickle"), guards.watched():
        _swallowing(load, content)
    assert not (tmp_path / "made").exists()


def _swallowing(load: Callable[[bytes], object], content: bytes) -> None:
    """A reader that hides what it met."""
    with suppress(BaseException):
        load(content)


def test_nor_by_way_of_c_or_torch(tmp_path: Path) -> None:
    import _pickle

    content = pickle.dumps(Explodes(str(tmp_path / "made")))
    # The guard must stop both; `Explodes` would only make a file in tmp_path.
    with pytest.raises(guards.Forbidden, match="find_class"), guards.watched():
        _pickle.loads(content)
    torch.save({"a": Explodes(str(tmp_path / "made"))}, tmp_path / "a.pt")
    with pytest.raises(guards.Forbidden, match=r"torch\.load"), guards.watched():
        torch.load(tmp_path / "a.pt", weights_only=False)
    assert not (tmp_path / "made").exists()


def spin() -> None:
    while True:
        pass


def test_time_and_memory_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "WAIT_S", 0.2)
    with pytest.raises(guards.Forbidden, match=r"longer than 0\.2"), guards.watched():
        time.sleep(30)
    monkeypatch.undo()
    monkeypatch.setattr(guards, "CASE_S", 0.2)
    with pytest.raises(guards.Forbidden, match=r"longer than 0\.2"), guards.watched():
        spin()
    monkeypatch.undo()
    monkeypatch.setattr(guards, "MOST_GROWTH", 64 << 20)
    with pytest.raises(guards.Forbidden, match="MiB"), guards.watched():
        bytearray(2 << 30).__len__()


@pytest.mark.parametrize("how", ["error", "kill", "value"])
def test_a_writer_that_writes_in_place(tmp_path: Path, how: str) -> None:
    text = "x" * 100_000

    def unwritable(path: Path) -> None:
        with path.open("w") as file:
            file.write("half")
            raise ValueError

    writing = Writing(tmp_path / "a", Writer(lambda path: _plainly(path, text), unwritable))
    with pytest.raises(AssertionError, match="is not what it was"):
        writing(Cut(how, 0.5))


def _plainly(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise DSparkError(f"cannot write {path}: {error}") from None
