"""Chat data as others keep it: rows of OpenAI's and of ShareGPT's form, in JSONL or one JSON list.

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
    """The rows of a file's text as (number, place in words, JSON): the entries of one JSON list
    when the text begins with a bracket, else its lines that are not empty, by their number.

    Raises ValueError naming the line where a list is broken.
    """
    text = text.removeprefix("\ufeff")
    if text.lstrip().startswith("["):
        for number, (start, entry) in enumerate(_entries(text), 1):
            yield number, f"line {start}, entry {number}", entry
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, f"line {number}", line


def _entries(text: str) -> Iterator[tuple[int, str]]:
    """The entries of a JSON list, each with the line it begins on."""
    decoder, line, counted = json.JSONDecoder(), 1, 0
    at, more = _skip(text, text.index("[") + 1), False
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
    if text[at + 1 :].strip():
        line += text.count("\n", counted, at)
        raise ValueError(f"line {line}: something stands behind the end of the list")


def _skip(text: str, at: int) -> int:
    """The first position from `at` on that is no white space of JSON's."""
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at
