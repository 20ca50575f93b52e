"""tools/prompts.py: copies of public sets in, a prompt file that training reads out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.training.prompts import read_prompts
from tools import prompts


def save(path: Path, content: str | list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else "\n".join(map(json.dumps, content))
    path.write_text(text, encoding="utf-8")


@pytest.fixture
def copies(tmp_path: Path) -> dict[str, Path]:
    """Copies of all sets, each with something that must not be a prompt."""
    folders = {each.option: tmp_path / each.option for each in prompts.SETS}
    save(folders["gsm8k"] / "grade_school_math/data/train.jsonl", [{"question": "How many? "}])
    save(folders["gsm8k"] / "grade_school_math/data/test.jsonl", [{"question": "Tested?"}])
    tasks = {2: "Sort it.", 11: "Tested.", 600: "Tested.", 601: "Sort it.", 602: "Add it."}
    save(
        folders["mbpp"],
        [{"task_id": i, "text": t, "test_list": ["assert f()", "no"]} for i, t in tasks.items()],
    )
    save(
        folders["algorithms"] / "sorts/a.py",
        'def first(x: int=1):\n    """Return the first number that is above the given one.\n\n'
        '    More."""\ndef _hidden():\n    """Return the first number that is above it."""'
        '\ndef short():\n    """Return it."""\n'
        'def second():\n    """Return the second number that is above the one.\n    >>> 1"""\n',
    )
    text = 'def solution():\n    """Return the largest prime that is below a given number."""\n'
    save(folders["algorithms"] / "project_euler/b.py", text)
    save(folders["stdlib"] / "pack/sub/c.py", text.replace("solution", "third"))
    save(folders["stdlib"] / "pack/z.py", text.replace("solution", "zeroth"))
    save(folders["stdlib"] / "test/d.py", text)
    save(folders["stdlib"] / "lib2to3/e.py", "print 'not Python 3'")
    save(folders["stdlib"] / "bad.py", "print 'not Python 3'")
    exercise = folders["exercism"] / "exercises/practice/leap/.docs"
    save(exercise / "instructions.md", "# Instructions\n\nFind leap years.\n")
    save(exercise / "introduction.md", "# Introduction\n")
    own = folders["self_instruct"]
    save(
        own / "data/seed_tasks.jsonl", [{"instruction": "Shorten.", "instances": [{"input": "A"}]}]
    )
    save(
        own / "human_eval/user_oriented_instructions.jsonl",
        [{"instruction": "Write a letter.", "instances": [{"input": ""}]}],
    )
    judged = folders["vicuna"] / "fastchat/llm_judge/data"
    save(judged / "vicuna_bench/question.jsonl", [{"turns": ["Rest?"]}, {"turns": ["Both?"]}])
    save(judged / "mt_bench/question.jsonl", [{"turns": ["Both?", "More?"]}])
    asked = "Which river is the\nlongest of the world?"
    others = "#Q Complete this saying of the old Romans\n^ x\n#Q Who?\n^ x\n"
    save(folders["trivia"] / "categories/world", f"#Q {asked}\n^ Nile\nA Nile\n{others}")
    return folders


def test_each_set_becomes_prompts(copies: dict[str, Path], tmp_path: Path) -> None:
    counts = prompts.write(tmp_path / "out.jsonl", copies)
    rows = read_prompts(tmp_path / "out.jsonl")
    trivia = rows.pop()
    assert [(row.domain, *row.turns) for row in rows] == [
        (
            "math",
            "How many?\nPlease reason step by step, and put your final answer within \\boxed{}.",
        ),
        ("code", "Sort it.\nYour code should pass this test:\nassert f()"),
        ("code", "Add it.\nYour code should pass this test:\nassert f()"),
        (
            "code",
            "Write a Python function `first(x: int=1)`. "
            "Return the first number that is above the given one.",
        ),
        (
            "code",
            "Implement `second()` in Python: Return the second number that is above the one.",
        ),
        (
            "code",
            "Write a Python function `zeroth()`. "
            "Return the largest prime that is below a given number.",
        ),
        (
            "code",
            "Implement `third()` in Python: Return the largest prime that is below a given number.",
        ),
        ("code", "Solve this exercise in Python.\n\n# Description\n\nFind leap years."),
        ("chat", "Shorten.\n\nInput:\nA"),
        ("chat", "Write a letter."),
        ("chat", "Rest?"),
    ]
    assert trivia.turns[0].startswith("Which river is the longest of the world?")
    assert counts["mbpp-train"] == 2, "a text that comes twice is one prompt"
    assert sum(counts.values()) == len(rows) + 1


def test_an_id_does_not_depend_on_the_other_sets(copies: dict[str, Path], tmp_path: Path) -> None:
    prompts.write(tmp_path / "all.jsonl", copies)
    prompts.write(tmp_path / "one.jsonl", {"vicuna": copies["vicuna"]})
    [alone] = read_prompts(tmp_path / "one.jsonl")
    ids = {row.turns: row.id for row in read_prompts(tmp_path / "all.jsonl")}
    assert len(set(ids.values())) == len(ids)
    assert ids[alone.turns] == alone.id


def test_a_copy_of_something_else_is_one_line(copies: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    with pytest.raises(DSparkError, match="no prompts of opentriviaqa; give --trivia"):
        prompts.write(out, {"trivia": tmp_path})
    with pytest.raises(DSparkError, match=r"cannot read .*train\.jsonl .*clone the set again"):
        prompts.write(out, {"gsm8k": tmp_path})
    save(copies["gsm8k"] / "grade_school_math/data/train.jsonl", "{}")
    with pytest.raises(DSparkError, match=r"train\.jsonl: a row has no question"):
        prompts.write(out, {"gsm8k": copies["gsm8k"]})
    assert not out.exists()


def test_the_command_names_its_sets(
    copies: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = str(tmp_path / "out.jsonl")
    monkeypatch.setattr(sys, "argv", ["prompts", out])
    assert prompts.main() == 1
    assert "no set is named" in capsys.readouterr().err
    given = ["--self-instruct", str(copies["self_instruct"])]
    monkeypatch.setattr(sys, "argv", ["prompts", out, *given])
    assert prompts.main() == 0
    assert capsys.readouterr().out == "self-instruct-seed: 1\nself-instruct-user-oriented: 1\n"
