"""Rows that training cannot use: skipped with their place and reason, never changed in silence."""

import json
import re

import pytest

from sglang_dspark.cli import train
from sglang_dspark.errors import DSparkError
from sglang_dspark.training.collect import plan_answers
from sglang_dspark.training.prompts import read_prompts
from sglang_dspark.training.setup import prepare
from tests.training.conftest import generate
from tests.training.test_data import _data
from tests.training.test_run import _in

CHAT = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]


def _read(path, *rows):
    """Ids of the rows that are read, and the lines about the others."""
    path.write_bytes(
        b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    )
    skipped = []
    return read_prompts(path, strict=False, skipped=skipped.append), skipped


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            b'{"prompt": "emoji \\ud800 lone"}',
            "prompt: half a surrogate pair, U+D800, as character 7",
        ),
        (b'{"turns": ["a", "\\udc00"]}', "turns: half a surrogate pair, U+DC00, as character 1"),
        (b'{"prompt": "a", "response": "\\udc00"}', "response: half a surrogate pair"),
        (b'{"prompt": "a", "domain": "\\udc00"}', "domain: half a surrogate pair"),
        (b'{"prompt": "a", "id": "\\udc00"}', "id: half a surrogate pair"),
        (b'{"prompt": "caf\xe9"}', "not UTF-8: byte 0xe9 at character 16 of the row"),
        (b'{"prompt": "\xed\xa0\x80"}', "not UTF-8: byte 0xed"),
        ({"prompt": "a", "messages": CHAT}, "has both `prompt` and `messages`; keep one"),
        ({"turns": ["a"], "prompt": "a"}, "has both `turns` and `prompt`; keep one"),
        (
            {"prompt": "a", "response": "b", "completion": "b"},
            "has both `response` and `completion`",
        ),
        ({"prompt": "a", "response": ""}, "response: expected text that is not empty"),
        ({"prompt": "a", "response": 7}, "response: expected text that is not empty"),
        ({"messages": CHAT, "response": "b"}, "`response` goes with `prompt` alone"),
        ({"turns": ["a", "b"], "completion": "b"}, "`completion` goes with `prompt` alone"),
    ],
)
def test_a_row_that_would_lose_something_is_skipped(tmp_path, row, reason):
    path = tmp_path / "p.jsonl"
    kept, skipped = _read(path, {"prompt": "w1"}, row, {"prompt": "w2"})
    assert [each.id for each in kept] == ["p-1", "p-3"]
    (line,) = skipped
    assert line.startswith(f"{path}, line 2: {reason}")
    assert line.isprintable()
    with pytest.raises(DSparkError, match=re.escape(reason)):
        read_prompts(path)


def test_a_prompt_that_its_conversation_repeats_loses_nothing(tmp_path):
    kept, skipped = _read(tmp_path / "p.jsonl", {"prompt": "w1", "messages": CHAT})
    assert ([each.turns for each in kept], skipped) == ([("w1",)], [])


@pytest.mark.parametrize("name", ["response", "completion"])
def test_an_answer_beside_a_prompt_is_as_one_of_chat_data(config, tmp_path, name):
    path = tmp_path / "p.jsonl"
    kept, skipped = _read(path, {"prompt": "w1", name: "w2"}, {"messages": CHAT}, {"prompt": "w1"})
    assert skipped == []
    assert [each.answer for each in kept] == ["w2", "w2", None]
    for answers in ("given", "target"):
        cfg = _data(config, prompts=(path,), answers=answers, store=tmp_path / answers)
        plan = plan_answers(cfg, _target(cfg), pytest.fail)
        found = {prompt.id: prompt.answer for prompt in plan.todo}
        assert found["p-1"] == found["p-2"]
        assert bool(found["p-1"]) is (answers == "given")
        assert found["p-3"] == ()


def _target(cfg):
    from sglang_dspark.evaluation.target import TargetModel

    return TargetModel.load(cfg.data.target).config


def test_a_file_of_broken_rows_says_why(tmp_path):
    path = tmp_path / "p.jsonl"
    with pytest.raises(
        DSparkError,
        match=r"p\.jsonl holds no prompts: all 3 rows are broken, the first in line 1: not JSON",
    ):
        _read(path, b"{", b"[1]", b"{}")
    with pytest.raises(DSparkError, match=r"holds no prompts: no row$"):
        _read(path, b"")


def test_the_command_writes_all_reasons_into_a_file_that_it_names(config, tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(["{"] * 38 + ['{"prompt": "w1"}', '{"prompt": "w2 \\ud800"}']))
    cfg = _data(config, prompts=(path,), store=tmp_path / "store")
    train._answer(cfg, 1e9)
    said = capsys.readouterr().out.splitlines()
    file = tmp_path / "store.skipped.txt"
    assert [line.startswith("skipped: ") for line in said[:6]] == [True] * 5 + [False]
    assert (
        said[5]
        == f"39 prompts skipped, all reasons in {file}; --strict stops at the first broken row"
    )
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) == 39
    assert lines[-1].startswith(f"{path}, line 40: prompt: half a surrogate pair, U+D800")
    assert said[0] == f"skipped: {lines[0]}"
    path.write_text('{"prompt": "w1"}\n{')
    train._answer(cfg, 1e9)
    assert "1 prompts skipped; --strict" in capsys.readouterr().out
    assert not file.exists()  # what an earlier run skipped


def test_reasons_come_out_where_no_row_is_left(config, tmp_path, capsys):
    path = tmp_path / "p.jsonl"
    path.write_text("{\n" * 7)
    cfg = _data(config, prompts=(path,), store=tmp_path / "store")
    with pytest.raises(DSparkError, match="all 7 rows are broken"):
        train._answer(cfg, 1e9)
    assert capsys.readouterr().out.count("skipped: ") == 5
    assert len((tmp_path / "store.skipped.txt").read_text().splitlines()) == 7


def test_a_drafter_is_not_trained_on_other_answers_than_it_says(config, tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"w{i}", "response": "w9 w8 w7"}) + "\n" for i in range(9))
    )
    cfg = _data(config, prompts=(path,), answers="given", store=tmp_path / "store")
    assert generate(cfg) == 9
    prepare(_in(cfg, tmp_path / "run"))
    other = _in(_data(cfg, answers="target"), tmp_path / "other")
    with pytest.raises(
        DSparkError, match=r"with another data\.answers: answers is given there, target here"
    ):
        prepare(other)
    assert not (tmp_path / "other").exists()
    meta = tmp_path / "store" / "meta.json"
    known = json.loads(meta.read_text())
    del known["answers"]  # an older store does not tell
    meta.write_text(json.dumps(known))
    prepare(other)
