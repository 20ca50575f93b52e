"""Chat data as others keep it: rows of OpenAI's and of ShareGPT's form.

    {"messages": [{"role": "system" | "user" | "assistant", "content": TEXT}, ...]}
    {"conversations": [{"from": "system" | "human" | "gpt", "value": TEXT}, ...]}

A row is a conversation up to the user's last words, which a model is to answer, and the answer
that the row gives, if an assistant's turn follows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from sglang_dspark.common.files import brief, fault

Turn = tuple[str, str]  # role: system, user or assistant; text
FIELDS = {"messages": ("role", "content"), "conversations": ("from", "value")}
FORMS = ("turns", "prompt", *FIELDS)  # fields that hold what is asked
_ROLES = {
    "messages": {"system": "system", "user": "user", "assistant": "assistant"},
    "conversations": {"system": "system", "human": "user", "gpt": "assistant"},
}


@dataclass(frozen=True)
class Conversation:
    """turns: a system's first where there is one, then user and assistant alternately, the user
    last. answer: what the row's assistant says to that, None without one."""

    turns: tuple[Turn, ...]
    answer: str | None


def as_messages(turns: tuple[Turn, ...]) -> list[dict[str, str]]:
    """The turns as a chat template takes them."""
    return [{"role": role, "content": text} for role, text in turns]


def conversation(row: dict[str, Any]) -> Conversation | None:
    """The conversation in a row, None when it has neither `messages` nor `conversations`.

    Raises ValueError that names the field which is wrong.
    """
    name = next((field for field in FIELDS if field in row), None)
    if name is None:
        return None
    if not isinstance(row[name], list) or not row[name]:
        raise ValueError(f"{name}: expected a list of at least one turn")
    turns = tuple(_turn(turn, name, i) for i, turn in enumerate(row[name]))
    _require_order(turns, name)
    users = [i for i, (role, _) in enumerate(turns) if role == "user"]
    end = users[-1] + 1
    return Conversation(turns[:end], turns[end][1] if end < len(turns) else None)


def require_one_form(row: dict[str, Any]) -> None:
    """ValueError when two fields of a row hold what is asked: one of them would be lost.

    A `prompt` that repeats the first user turn of the conversation loses nothing.
    """
    names = [name for name in FORMS if name in row]
    if names and names[0] == "prompt" and len(names) == 2:
        chat = conversation(row)
        if chat is not None and row["prompt"] == next(
            t for role, t in chat.turns if role == "user"
        ):
            return
    if len(names) > 1:
        raise ValueError(f"has both `{names[0]}` and `{names[1]}`; keep one")


def require_text(text: str, where: str) -> None:
    """ValueError when a text has half a surrogate pair, which no encoding of Unicode can hold."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise ValueError(
            f"{where}: half a surrogate pair, U+{code:04X}, as character {error.start + 1}"
        ) from None


def _turn(turn: Any, name: str, i: int) -> Turn:
    where, (who, words) = f"{name}[{i}]", FIELDS[name]
    if not isinstance(turn, dict):
        raise ValueError(f"{where}: expected an object with `{who}` and `{words}`")
    roles, said = _ROLES[name], turn.get(who)
    if not isinstance(said, str) or said not in roles:
        found = f"found {brief(repr(said), 40)}" if who in turn else "it is missing"
        raise ValueError(f"{where}.{who}: expected one of {', '.join(roles)}; {found}")
    return roles[said], _text(turn.get(words), f"{where}.{words}")


def _text(value: Any, where: str) -> str:
    """A turn's text, given as such or in OpenAI's parts."""
    if isinstance(value, list):
        parts = [p.get("text") if isinstance(p, dict) else None for p in value]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise ValueError(f"{where}: holds parts that are no text")
        value = "".join(texts)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: expected text that is not empty")
    require_text(value, where)
    return value


def _require_order(turns: tuple[Turn, ...], name: str) -> None:
    """ValueError unless user and assistant alternate, the user first, after at most one system."""
    who = FIELDS[name][0]
    said = {role: theirs for theirs, role in _ROLES[name].items()}
    first = 1 if turns[0][0] == "system" else 0
    if first == len(turns):
        raise ValueError(f"{name}: nothing but a {said['system']} turn")
    if turns[first][0] != "user":
        raise ValueError(f"{name}[{first}].{who}: the {said['user']} must speak first")
    for i, ((before, _), (role, _)) in enumerate(pairwise(turns[first:]), first + 1):
        if role == before or role == "system":
            raise ValueError(
                f"{name}[{i}].{who}: {said['user']} and {said['assistant']} must alternate, found "
                f"{said[role]} after {said[before]}"
            )


def rows_of(text: str) -> Iterator[tuple[int, str, str]]:
    """The rows of a file's text as (number, place in words, JSON): the entries of one JSON list, or
    of the list `data` of one JSON object; else its lines that are not empty, by their number. One
    JSON object without such a list is one row, over however many lines it is written.

    Raises ValueError naming the line where a list is broken.
    """
    text = text.removeprefix("\ufeff")
    first = _skip(text, 0)
    whole = _whole_object(text, first)
    opening = first if text.startswith("[", first) else _data_list(text, first, whole)
    if opening is not None:
        for number, (start, entry) in enumerate(_entries(text, opening, whole is not None), 1):
            yield number, f"line {start}, entry {number}", entry
        return
    if whole is not None:
        yield 1, f"line {text.count(chr(10), 0, first) + 1}", text[first:]
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, f"line {number}", line


def _whole_object(text: str, at: int) -> dict[str, Any] | None:
    """The JSON object that is all of the text from `at` on, None for anything else."""
    if not text.startswith("{", at):
        return None
    try:
        value, end = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
    return value if _skip(text, end) == len(text) else None


def _data_list(text: str, at: int, whole: dict[str, Any] | None) -> int | None:
    """Find the list `data` of the object at `at`; None where the object is a row itself."""
    if (
        whole is None
        or not isinstance(whole.get("data"), list)
        or not whole.keys().isdisjoint(FORMS)
    ):
        return None
    decoder = json.JSONDecoder()
    at = _skip(text, at + 1)
    while True:  # ends: the object has the field, and its text can be read
        name, end = decoder.raw_decode(text, at)
        at = _skip(text, _skip(text, end) + 1)  # behind the colon
        if name == "data" and text.startswith("[", at):
            return at
        _, end = decoder.raw_decode(text, at)
        at = _skip(text, _skip(text, end) + 1)  # behind the comma


def _entries(text: str, opening: int, inside: bool) -> Iterator[tuple[int, str]]:
    """The entries of the JSON list at `opening`, each with the line it begins on.

    inside: the list is of an object, so more may stand behind it.
    """
    decoder, line, counted = json.JSONDecoder(), 1, 0
    at, more = _skip(text, opening + 1), False
    while more or not text.startswith("]", at):
        line, counted = line + text.count("\n", counted, at), at
        try:
            _, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else fault(error)
            raise ValueError(f"line {line}: not JSON ({reason})") from None
        yield line, text[at:end]
        at = _skip(text, end)
        more = text.startswith(",", at)
        if more:
            at = _skip(text, at + 1)
        elif not text.startswith("]", at):
            line += text.count("\n", counted, at)
            raise ValueError(f"line {line}: not JSON (no comma or ] behind an entry of the list)")
    if not inside and text[at + 1 :].strip():
        line += text.count("\n", counted, at)
        raise ValueError(f"line {line}: something stands behind the end of the list")


def _skip(text: str, at: int) -> int:
    """The first position from `at` on that is no white space of JSON's."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at
