"""The prompts of the narrow domain: training and evaluation read them, and the tool refuses to
write them without the library whose questions they are."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_dspark.cli._workload import read_prompt_files
from tools import narrow_prompts


def test_another_version_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(narrow_prompts, "FOLDER", tmp_path / "narrow")
    monkeypatch.setattr(narrow_prompts, "version", lambda _name: "0.0.1")
    assert narrow_prompts.main() == 2
    said = capsys.readouterr().err
    assert "0.0.1 is installed: pip install reasoning-gym==0.1.25" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "narrow").exists(), "nothing half-written"


def test_no_question_is_in_both_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Some questions come twice from a seed, and some from both."""

    def drawn(_name: str, size: int, seed: int) -> list[dict[str, str]]:
        known = size // 2 + 5
        return [{"question": f"How many are {(i + 3 * seed) % known}?"} for i in range(size)]

    monkeypatch.setitem(sys.modules, "reasoning_gym", SimpleNamespace(create_dataset=drawn))
    trained = narrow_prompts.questions(1, 8)
    tested = narrow_prompts.questions(2, 4, trained)
    assert (len(trained), len(set(trained))) == (8, 8)
    assert tested
    assert not set(trained) & set(tested)
    narrow_prompts.write(tmp_path / "test.jsonl", tested)
    read = read_prompt_files([f"math={tmp_path / 'test.jsonl'}"], None)
    assert [(each.id, each.domain) for each in read] == [
        (f"test-{i}", "math") for i in range(len(tested))
    ]
