"""Read chat data in the forms of OpenAI and of ShareGPT.

    {"messages": [{"role": "system" | "user" | "assistant", "content": TEXT}, ...]}
    {"conversations": [{"from": "system" | "human" | "gpt", "value": TEXT}, ...]}

A row is a conversation up to the user's last turn, which a model is to answer, and the answer
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
FORMS = ("turns", "prompt", *FIELDS)  # fields that can hold a row's prompt
_ROLES = {
    "messages": {"system": "system", "user": "user", "assistant": "assistant"},
    "conversations": {"system": "system", "human": "user", "gpt": "assistant"},
}


@dataclass(frozen=True)
class Conversation:
    """A row's turns and answer.

    turns: an optional system turn, then user and assistant alternately, the user last. answer: the
    row's answer by the assistant, None without one.
    """

    turns: tuple[Turn, ...]
    answer: str | None


def as_messages(turns: tuple[Turn, ...]) -> list[dict[str, str]]:
    """Convert turns to the messages of a chat template."""
    return [{"role": role, "content": text} for role, text in turns]


def conversation(row: dict[str, Any]) -> Conversation | None:
    """Return the conversation in a row, None if it has neither `messages` nor `conversations`.

    Raises ValueError that names the wrong field.
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
    """Raise ValueError if two fields of a row hold a prompt: one of them would be lost.

    A `prompt` that repeats the first user turn of the conversation is allowed.
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
    """Raise ValueError if a text has a lone surrogate, which no encoding of Unicode can hold."""
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
    """Return a turn's text, given as a string or as OpenAI's content parts."""
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
    """Raise ValueError unless, after an optional system turn, user and assistant alternate."""
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
    """Yield the rows of a file's text as (number, place in words, JSON).

    Rows are the entries of one JSON list, or of the list `data` of one JSON object; else the lines
    that are not empty, by their number. One JSON object without such a list is one row, on any
    number of lines. Raises ValueError that names the line where a list is broken.
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
    """Return the JSON object that fills the text from `at` on, None for anything else."""
    if not text.startswith("{", at):
        return None
    try:
        value, end = json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None
    return value if _skip(text, end) == len(text) else None


def _data_list(text: str, at: int, whole: dict[str, Any] | None) -> int | None:
    """Return the ECE over `bins` equal-width bins of survival; NaN when empty."""
    if (
        whole is None
        or not isinstance(whole.get("data"), list)
        or not whole.keys().isdisjoint(FORMS)
    ):
        return None
    decoder = json.JSONDecoder()
    at = _skip(text, at + 1)
    while True:  # terminates: the object has the field and is valid JSON
        name, end = decoder.raw_decode(text, at)
        at = _skip(text, _skip(text, end) + 1)  # after the colon
        if name == "data" and text.startswith("[", at):
            return at
        _, end = decoder.raw_decode(text, at)
        at = _skip(text, _skip(text, end) + 1)  # after the comma


def _entries(text: str, opening: int, inside: bool) -> Iterator[tuple[int, str]]:
    """Yield the entries of the JSON list at `opening`, each with the line on which it begins.

    inside: the list is in an object, so more text may follow it.
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
    """Return the first position from `at` on that is not JSON white space."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at
