"""Prompts for training: JSONL in, token ids out; and prompts that the target writes itself.

A line is an object with `turns` (list of user turns, the first is used) or `prompt`, and optionally
`id` and `domain`. Self-written prompts start from an empty user turn and let the target sample what
a user would say, so that a drafter can be trained for a target without any prompt set.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dspark.errors import DSparkError


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenised: `ids` ends where the target's answer begins."""

    id: str
    domain: str
    ids: tuple[int, ...]
    temperature: float
    max_new_tokens: int


def read_prompts(path: Path) -> list[dict[str, str]]:
    """Rows `{id, domain, text}` of a JSONL file.

    Raises DSparkError naming file and line for anything that is not such a row.
    """
    if not path.is_file():
        raise DSparkError(f"no prompt file at {path}")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            text = row["turns"][0] if "turns" in row else row["prompt"]
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise DSparkError(
                f"{path}, line {number}: expected an object with `turns` or `prompt` ({error!r})"
            ) from None
        rows.append(
            {
                "id": str(row.get("id", f"{path.stem}-{number}")),
                "domain": str(row.get("domain", "chat")),
                "text": str(text),
            }
        )
    if not rows:
        raise DSparkError(f"{path} holds no prompts")
    return rows


def chat_ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Token ids of a one-turn conversation up to the start of the answer."""
    message = [{"role": "user", "content": text}]
    return tuple(
        tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
    )


def user_turn_prefix(tokenizer: Any) -> tuple[int, ...]:
    """Token ids of a conversation up to the start of the user's words."""
    mark = "\u241f"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=False
    )
    return tuple(tokenizer(text.split(mark)[0], add_special_tokens=False).input_ids)
