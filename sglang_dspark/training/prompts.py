"""Read prompts for training as token ids, and prepare prompts that the target writes.

A row of a file (`evaluation/prompt_files.py`) is an object with `turns` (user turns, each answered
by the target), with `prompt`, or chat data (`evaluation/conversations.py`), whose last user turn is
answered; optionally with `id` and `domain`. An answer next to `prompt` (`response`, `completion`)
is read as that of chat data. Self-written prompts start from an empty user turn and let the target
sample what a user would say, so that a drafter can be trained for a target without any prompt set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from sglang_dspark.common.files import FAULTS, fault
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.conversations import (
    FORMS,
    Turn,
    as_messages,
    conversation,
    require_one_form,
    require_text,
)
from sglang_dspark.evaluation.prompt_files import FileRow, file_rows, parse_row

ANSWERS = ("response", "completion")  # fields that answer `prompt`


@dataclass(frozen=True)
class Prompt:
    """One conversation, tokenised: `ids` ends where the target's first answer begins.

    later: for each further user turn, the ids from the end of the target's answer (the stop token
    that the chat template puts there included) to the start of the next answer.
    answer: ids of an answer that is given, its stop token included; empty if the target answers.
    """

    id: str
    domain: str
    ids: tuple[int, ...]
    temperature: float
    max_new_tokens: int
    later: tuple[tuple[int, ...], ...] = ()
    answer: tuple[int, ...] = ()


@dataclass(frozen=True)
class PromptRow:
    """A row of a prompt file.

    turns: the user's, each to be answered. before: the turns before them. answer: the row's answer
    to the last one, or None. where: file and line.
    """

    id: str
    domain: str
    turns: tuple[str, ...]
    where: str
    before: tuple[Turn, ...] = ()
    answer: str | None = None

    @property
    def asked(self) -> tuple[str, ...]:
        """Return all turns of the user."""
        return (*(text for role, text in self.before if role == "user"), *self.turns)

    @property
    def opening(self) -> tuple[Turn, ...]:
        """Return the conversation up to the first user turn that is to be answered."""
        return (*self.before, ("user", self.turns[0]))


def read_prompts(
    path: Path, *, strict: bool = True, skipped: Callable[[str], None] | None = None
) -> list[PromptRow]:
    """Return the rows of a prompt file.

    If `strict`, a broken row raises DSparkError with its place and the reason. Otherwise it is
    skipped and `skipped` gets the same line. Raises DSparkError if no row is left.
    """
    if not path.is_file():
        raise DSparkError(f"no prompt file at {path}")
    rows: list[PromptRow] = []
    broken: list[str] = []
    for each in file_rows(path):
        try:
            rows.append(_row(each, f"{path.stem}-{each.number}", f"{path}, {each.place}"))
        except FAULTS as error:
            broken.append(f"{each.place}: {_reason(error)}")
            reason = f"{path}, {broken[-1]}"
            if strict:
                raise DSparkError(f"{reason}; correct the row, or leave --strict out") from None
            if skipped:
                skipped(reason)
    if not rows:
        why = f"all {len(broken)} rows are broken, the first in {broken[0]}" if broken else "no row"
        raise DSparkError(f"{path} holds no prompts: {why}")
    return rows


def _row(file_row: FileRow, default_id: str, where: str) -> PromptRow:
    row = parse_row(file_row)
    names = str(row.get("id", default_id)), str(row.get("domain", "chat"))
    for field, text in zip(("id", "domain"), names, strict=True):
        require_text(text, field)
    require_one_form(row)
    answer = _answer(row)
    chat = conversation(row)
    if chat is not None:
        *before, (_, asked) = chat.turns
        return PromptRow(*names, (asked,), where, tuple(before), chat.answer)
    turns = row["turns"] if "turns" in row else [row["prompt"]]
    if not isinstance(turns, list) or not turns:
        raise TypeError("`turns` must be a list of at least one user turn")
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise TypeError("a user turn must be text that is not empty")
    for turn in turns:
        require_text(turn, "turns" if "turns" in row else "prompt")
    return PromptRow(*names, tuple(turns), where, answer=answer)


def _answer(row: dict[str, Any]) -> str | None:
    """Return the answer next to `prompt`, or None. Raises ValueError if it is misplaced."""
    given = [name for name in ANSWERS if name in row]
    if not given:
        return None
    name, text = given[0], row[given[0]]
    if len(given) > 1:
        raise ValueError(f"has both `{name}` and `{given[1]}`; keep one")
    if list(row.keys() & set(FORMS)) != ["prompt"]:
        raise ValueError(f"`{name}` goes with `prompt` alone; write it as the last assistant turn")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{name}: expected text that is not empty")
    require_text(text, name)
    return text


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return "none of `turns`, `prompt`, `messages` and `conversations`"
    return fault(error)


def require_chat_template(tokenizer: Any, target: Path) -> None:
    """Raise DSparkError if the target has no chat template to write prompts with."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise DSparkError(
            f"{target} has no chat template, which prompts are written with: take a model that "
            "chats, or add its chat_template.jinja"
        )


def chat_ids(tokenizer: Any, turns: tuple[Turn, ...]) -> tuple[int, ...]:
    """Return token ids of a conversation, the user's turn last, up to the start of the answer."""
    messages = as_messages(turns)
    return tuple(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    )


def answer_ids(
    tokenizer: Any, turns: tuple[Turn, ...], answer: str, stop_ids: frozenset[int]
) -> tuple[int, ...]:
    """Return the token ids of a given answer after `chat_ids` of `turns`, up to its stop token.

    Raises ValueError if the chat template writes the prompt differently when an answer follows.
    """
    asked = tokenizer.apply_chat_template(
        as_messages(turns), tokenize=False, add_generation_prompt=True
    )
    whole = tokenizer.apply_chat_template(
        as_messages((*turns, ("assistant", answer))), tokenize=False
    )
    if not whole.startswith(asked):
        raise ValueError("the target's chat template does not keep the prompt before an answer")
    ids = tuple(tokenizer(whole[len(asked) :], add_special_tokens=False).input_ids)
    end = next((i + 1 for i, token in enumerate(ids) if token in stop_ids), len(ids))
    return ids[:end]


def later_ids(tokenizer: Any, turns: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return `Prompt.later` of a conversation: the tokens between two of its answers."""
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
    """Return the token ids of a conversation up to the start of the user's words."""
    mark = "\u241f"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=False
    )
    return tuple(tokenizer(text.split(mark)[0], add_special_tokens=False).input_ids)
