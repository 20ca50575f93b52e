"""Prompt mixes: math, code and chat of the evaluation set, shared-prefix conversations, own files.

A mix is named by its parts, joined by commas: `math`, `code`, `chat`, `multi-turn`, `words`, or a
JSONL file as `dspark eval` reads it. `code@300` are the code prompts, each after at least 300 words
of other prompts, so that a report compares input lengths. `words` are 256 short prompts without
meaning, for targets with meaningless answers whose tokens are bytes. The conversations of
`multi-turn` share one of a few long openings. Each turn is a request that repeats all turns before
it, as a chat server receives them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.prompts import EvalPrompt, evaluation_prompts, read_prompts
from sglang_dspark.loadtest.client.bodies import Api, Prompt
from sglang_dspark.loadtest.client.cell import CellPrompt

DOMAINS = ("math", "code", "chat")
MULTI_TURN = "multi-turn"
WORDS, WORDS_COUNT = "words", 256
MULTI_TURN_FILE = "multi_turn.json"
Render = Callable[[EvalPrompt], str]


@dataclass(frozen=True)
class Mix:
    """Prompts, and the groups of their indices that are sent in this order."""

    prompts: tuple[EvalPrompt, ...]
    groups: tuple[tuple[int, ...], ...]


def load_mix(name: str) -> Mix:
    """Load the mix of that name. Raises DSparkError for an unknown part or an empty file."""
    parts = [part.strip() for part in name.split(",") if part.strip()]
    if not parts:
        raise DSparkError(f"prompt mix {name!r} names nothing; try math,code,chat")
    prompts: list[EvalPrompt] = []
    groups: list[tuple[int, ...]] = []
    for part in parts:
        for group in _groups(part):
            groups.append(tuple(range(len(prompts), len(prompts) + len(group))))
            prompts += group
    return Mix(tuple(prompts), tuple(groups))


def multi_turn_prompts() -> list[list[EvalPrompt]]:
    """Return the shipped conversations, each as one prompt per turn, of growing length."""
    text = (resources.files(__package__) / MULTI_TURN_FILE).read_text(encoding="utf-8")
    shipped = json.loads(text)
    return [
        [
            EvalPrompt(f"{row['id']}-{asked // 2 + 1}", MULTI_TURN, tuple(turns[: asked + 1]))
            for asked in range(0, len(turns), 2)
        ]
        for row in shipped["conversations"]
        for turns in [_opened(shipped["openings"][row["opening"]], row["turns"])]
    ]


def cell_prompts(mix: Mix, api: Api, render: Render | None = None) -> tuple[CellPrompt, ...]:
    """Convert the prompts to the form of one interface.

    render: converts a conversation to text for completions and `/generate`
    (`workload.render` with the target's chat template); None joins the turns by blank lines.
    """

    def content(prompt: EvalPrompt) -> Prompt:
        if api == "chat":
            return prompt.messages()
        return "\n\n".join(prompt.turns) if render is None else render(prompt)

    return tuple(CellPrompt(each.id, each.domain, content(each)) for each in mix.prompts)


def _longer(kind: str, words: int) -> list[EvalPrompt]:
    """Return the prompts of a kind, each after others of the evaluation set, `words` words or more.

    The others are those that follow it in the set: no two prompts share a beginning, whose prefill
    a prefix cache would skip.
    """
    every = evaluation_prompts()
    found = []
    for at, prompt in enumerate(every):
        if prompt.domain != kind:
            continue
        context: list[str] = []
        for other in every[at + 1 :] + every[:at]:
            if len(" ".join(context).split()) >= words:
                break
            context.append("\n\n".join(other.turns))
        first = "\n\n".join([*context, prompt.turns[0]])
        turns = (first, *prompt.turns[1:])
        found.append(
            replace(prompt, id=f"{prompt.id}@{words}", domain=f"{kind}@{words}", turns=turns)
        )
    return found


def _groups(part: str) -> list[list[EvalPrompt]]:
    kind, at, words = part.partition("@")
    if kind in DOMAINS and at and words.isdecimal():
        return [[prompt] for prompt in _longer(kind, int(words))]
    if part == MULTI_TURN:
        return multi_turn_prompts()
    if part == WORDS:
        return [[EvalPrompt(f"words-{n}", WORDS, (_words(n),))] for n in range(WORDS_COUNT)]
    if part in DOMAINS:
        return [[prompt] for prompt in evaluation_prompts() if prompt.domain == part]
    if not Path(part).is_file():
        known = ", ".join((*DOMAINS, *(f"{each}@WORDS" for each in DOMAINS), MULTI_TURN, WORDS))
        raise DSparkError(f"no prompts {part!r}: neither one of {known} nor a file")
    return [[prompt] for prompt in read_prompts(Path(part))]


def _words(number: int) -> str:
    """Return a prompt with one of 94 last characters, as some targets read only the last token."""
    return f"go on, {number} {chr(ord('!') + number % 94)}"


def _opened(opening: str, turns: list[str]) -> list[str]:
    return [f"{opening}\n\n{turns[0]}", *turns[1:]]
