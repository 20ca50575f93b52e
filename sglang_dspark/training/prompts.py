"""Prompts for training: JSONL in, token ids out; and prompts that the target writes itself.

A line is an object with `turns` (list of user turns, each answered by the target) or `prompt`, and
optionally `id` and `domain`. Self-written prompts start from an empty user turn and let the target
sample what a user would say, so that a drafter can be trained for a target without any prompt set.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from sglang_dspark.errors import DSparkError
from sglang_dspark.files import FAULTS, fault, parse_json


@dataclass(frozen=True)
class Prompt:
    """One conversation, tokenised: `ids` ends where the target's first answer begins.

    later: for each further user turn, the ids from the end of the target's answer (the stop token
    that the chat template puts there included) to the start of the next answer.
    """

    id: str
    domain: str
    ids: tuple[int, ...]
    temperature: float
    max_new_tokens: int
    later: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class PromptRow:
    """A line of a prompt file."""

    id: str
    domain: str
    turns: tuple[str, ...]


def read_prompts(
    path: Path, *, strict: bool = True, skipped: Callable[[str], None] | None = None
) -> list[PromptRow]:
    """Rows of a JSONL file.

    A line that is not such a row raises DSparkError with its number and the reason when `strict`;
    otherwise it is left out and `skipped` is told the same.
    """
    if not path.is_file():
        raise DSparkError(f"no prompt file at {path}")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf8", errors="replace").split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows.append(_row(line, f"{path.stem}-{number}"))
        except FAULTS as error:
            reason = f"{path}, line {number}: {_reason(error)}"
            if strict:
                raise DSparkError(f"{reason}; correct the line, or leave --strict out") from None
            if skipped:
                skipped(reason)
    if not rows:
        raise DSparkError(f"{path} holds no prompts")
    return rows


def _row(line: str, default_id: str) -> PromptRow:
    row = parse_json(line, finite=False)
    if not isinstance(row, dict):
        raise TypeError("expected an object")
    turns = row["turns"] if "turns" in row else [row["prompt"]]
    if not isinstance(turns, list) or not turns:
        raise TypeError("`turns` must be a list of at least one user turn")
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise TypeError("a user turn must be text that is not empty")
    return PromptRow(str(row.get("id", default_id)), str(row.get("domain", "chat")), tuple(turns))


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"not JSON ({error.msg}, column {error.colno})"
    if isinstance(error, KeyError):
        return "neither `turns` nor `prompt`"
    return fault(error)


def chat_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of a one-turn conversation up to the start of the answer."""
    message = [{"role": "user", "content": text}]
    return tuple(
        tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    )


def later_ids(tokenizer: Any, turns: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """`Prompt.later` of a conversation: what the chat template puts between two answers."""
    if len(turns) == 1:
        return ()
    mark = "\u241f"
    pieces = []
    for before, turn in pairwise(turns):
        text = tokenizer.apply_chat_template(
            [
                {"role": "user", "content": before},
                {"role": "assistant", "content": mark},
                {"role": "user", "content": turn},
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        between = text.split(mark)[-1].lstrip(" ")
        pieces.append(tuple(tokenizer(between, add_special_tokens=False).input_ids))
    return tuple(pieces)


def user_turn_prefix(tokenizer: Any) -> tuple[int, ...]:
    """Token ids of a conversation up to the start of the user's words."""
    mark = "\u241f"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=False
    )
    return tuple(tokenizer(text.split(mark)[0], add_special_tokens=False).input_ids)
