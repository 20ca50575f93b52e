"""Chat data of others: what a row says, and the field that a broken one names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.conversations import (
    Conversation,
    conversation,
    require_one_form,
    rows_of,
)
from sglang_dspark.evaluation.prompts import EvalPrompt, read_prompts


def messages(*turns: tuple[str, object]) -> dict[str, object]:
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def sharegpt(*turns: tuple[str, object]) -> dict[str, object]:
    return {"conversations": [{"from": who, "value": text} for who, text in turns]}


FIRST = (("system", "Be brief."), ("user", "hi"), ("assistant", "hello"), ("user", "who?"))


def test_both_forms_read_the_same_up_to_the_users_last_words() -> None:
    theirs = {"system": "system", "user": "human", "assistant": "gpt"}
    for answer in (None, "me"):
        said = FIRST if answer is None else (*FIRST, ("assistant", answer))
        expected = Conversation(FIRST, answer)
        assert conversation(messages(*said)) == expected
        assert conversation(sharegpt(*((theirs[role], text) for role, text in said))) == expected
    assert conversation({"prompt": "hi"}) is None


def test_openais_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert conversation(messages(("user", parts))) == Conversation((("user", "one two"),), None)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"messages": []}, "messages: expected a list of at least one turn"),
        ({"messages": "hi"}, "messages: expected a list"),
        ({"messages": ["hi"]}, r"messages\[0\]: expected an object with `role` and `content`"),
        (messages(("tool", "x")), r"messages\[0\].role: .* found 'tool'"),
        ({"conversations": [{"value": "x"}]}, r"conversations\[0\].from: .* it is missing"),
        (sharegpt(("user", "x")), r"conversations\[0\].from: expected one of system, human, gpt"),
        (messages(("user", " ")), r"messages\[0\].content: expected text that is not empty"),
        (messages(("user", [{"type": "image_url"}])), r"messages\[0\].content: .* no text"),
        (sharegpt(("gpt", "x"), ("human", "y")), r"conversations\[0\].from: the human must speak"),
        (messages(("user", "x"), ("user", "y")), r"messages\[1\].role: .* user after user"),
        (messages(("user", "x"), ("system", "y")), r"messages\[1\].role: .* system after user"),
        (messages(("system", "x")), "messages: nothing but a system turn"),
        (messages(("user", "x\ud800")), r"messages\[0\].content: half a surrogate pair, U\+D800"),
    ],
)
def test_a_broken_row_names_its_field(row: dict[str, object], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        conversation(row)


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_list_has_the_rows_of_the_lines(indent: int | None) -> None:
    rows = [{"prompt": "a, [b]\n"}, messages(("user", "c")), {"prompt": "]"}]
    lines = list(rows_of("\n".join(map(json.dumps, rows))))
    assert [(number, place) for number, place, _ in lines] == [
        (1, "line 1"),
        (2, "line 2"),
        (3, "line 3"),
    ]
    text = "\ufeff\n" + json.dumps(rows, indent=indent) + "\n"
    entries = list(rows_of(text))
    assert [json.loads(entry) for *_, entry in entries] == rows
    assert [number for number, *_ in entries] == [1, 2, 3]
    begins = [3, 6, 14] if indent else [2, 2, 2]
    assert [place for _, place, _ in entries] == [
        f"line {line}, entry {i}" for i, line in enumerate(begins, 1)
    ]
    assert list(rows_of("[]")) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('[{"a": 1},\n{"a" 2}]', "line 2: not JSON"),
        ('[{"a": 1},\n]', "line 2: not JSON"),
        ('[{"a": 1}\n{"a": 2}]', "line 2: .*no comma"),
        ('[{"a": 1}]\n\n{"a": 2}', "something stands behind the end of the list"),
        ("[" * 100_000, "line 1: not JSON"),
        ('[{"a": 1}', "line 1: .*no comma or ]"),
    ],
)
def test_a_broken_list_names_its_line(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        list(rows_of(text))


def test_evaluation_reads_chat_data_with_its_system_turn(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    rows = [messages(*FIRST, ("assistant", "me")), {"id": "b", **sharegpt(("human", "x"))}]
    path.write_text(json.dumps(rows))
    first, second = read_prompts(path)
    assert first == EvalPrompt("chats-1", "all", ("hi", "hello", "who?"), "Be brief.")
    assert [(m["role"], m["content"]) for m in first.messages()] == list(FIRST)
    assert second == EvalPrompt("b", "all", ("x",))
    path.write_text(json.dumps([*rows, sharegpt(("gpt", "x"))]))
    with pytest.raises(
        DSparkError, match=r"chats\.json, line 1, entry 3: conversations\[0\]\.from"
    ):
        read_prompts(path)


@pytest.mark.parametrize("indent", [None, 2])
def test_the_list_of_an_object_is_its_field_data(indent: int | None) -> None:
    rows = [{"prompt": "a"}, {"prompt": '"data": ['}]
    text = json.dumps({"about": {"data": [1]}, "data": rows, "more": "]"}, indent=indent)
    entries = list(rows_of(text))
    assert [json.loads(entry) for *_, entry in entries] == rows
    begins = [8, 11] if indent else [1, 1]
    assert [(n, place) for n, place, _ in entries] == [
        (i, f"line {line}, entry {i}") for i, line in enumerate(begins, 1)
    ]
    assert list(rows_of('{"data": []}')) == []


@pytest.mark.parametrize(
    "row",
    [{"prompt": "a", "data": [1]}, {"data": "a"}, {"prompt": "a"}, {"turns": ["a"], "data": [2]}],
)
def test_an_object_without_a_list_of_data_is_one_row(row: dict[str, object]) -> None:
    for text in (json.dumps(row), "\n" + json.dumps(row, indent=1)):
        ((number, _, line),) = rows_of(text)
        assert (number, json.loads(line)) == (1, row)
    two = f"{json.dumps({'data': [1]})}\n{json.dumps(row)}\n"  # two lines: no object is all
    assert [json.loads(line) for *_, line in rows_of(two)] == [{"data": [1]}, row]


def test_a_row_has_one_form() -> None:
    said = messages(("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "c"))
    require_one_form({})
    require_one_form(said)
    require_one_form({"prompt": "a", **said})  # as some sets have it: nothing is lost
    for other in ({"prompt": "c"}, {"turns": ["a"]}, sharegpt(("human", "a")), {"prompt": 7}):
        with pytest.raises(ValueError, match=r"has both `.*` and `.*`; keep one"):
            require_one_form({**said, **other})
