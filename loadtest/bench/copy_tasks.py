"""Tasks whose answer is a copy: identifiers, hashes, UUIDs, paths, JSON, each among similar lines.

A prompt lists lines that differ from each other in a character or two and asks for one of them.
No reference answer is needed, and any model can serve: a server that drafts must return the plain
server's tokens, and such text reveals a wrong token that prose would hide. Several questions share
a list, so that they share a prefix, and some are repeated.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from sglang_dspark.errors import DSparkError

LEAST_LINES, MOST_LINES = 3, 14  # of a list: prompts of one chunk of the prefill and of several
ASKED = 4  # questions of one list
AGAIN = 0.1  # part of the tasks that repeat an earlier one
LEAST_TOKENS = 4
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_WORDS = ("user", "order", "index", "cache", "token", "frame", "block", "shard", "query", "node")


@dataclass(frozen=True)
class Task:
    """kind: of the copied text; prompt: a user's message; tokens: of the answer at most."""

    kind: str
    prompt: str
    tokens: int


def copy_tasks(count: int, most_tokens: int, seed: int) -> list[Task]:
    """Create `count` tasks, the kinds in turn; answers of LEAST_TOKENS to `most_tokens` tokens.

    Raises DSparkError for numbers that allow no tasks.
    """
    if count < 1 or most_tokens < LEAST_TOKENS:
        raise DSparkError(f"a screen needs a request, and answers of {LEAST_TOKENS} tokens or more")
    draw = random.Random(seed)
    tasks: list[Task] = []
    kinds = list(KINDS.items())
    lists = 0
    while len(tasks) < count:
        kind, make = kinds[lists % len(kinds)]
        lists += 1
        lines = _alike(make, draw.randint(LEAST_LINES, MOST_LINES), draw)
        for _ in range(ASKED):
            if tasks and draw.random() < AGAIN:
                tasks.append(draw.choice(tasks[-64:]))  # its prefix may still be cached
            tasks.append(_task(kind, lines, draw.randint(LEAST_TOKENS, most_tokens), draw))
    return tasks[:count]


def _task(kind: str, lines: list[str], tokens: int, draw: random.Random) -> Task:
    listed = "\n".join(f"{number}: {line}" for number, line in enumerate(lines, 1))
    asked = draw.randint(1, len(lines))
    question = f"Copy line {asked} exactly, without its number and without another word."
    return Task(kind, f"{listed}\n\n{question}", tokens)


def _alike(make: Callable[[random.Random], str], count: int, draw: random.Random) -> list[str]:
    """Create similar lines: one, and copies of these with a character exchanged."""
    first = make(draw)
    lines = [first]
    while len(lines) < count:
        line = list(draw.choice(lines))
        places = [place for place, letter in enumerate(line) if letter.isalnum()]
        line[draw.choice(places)] = draw.choice("0123456789abcdef")
        lines.append("".join(line))
    return lines


def _identifier(draw: random.Random) -> str:
    words = "_".join(draw.sample(_WORDS, 2))
    return f"{words}_{''.join(draw.choices(_LETTERS, k=16))}"


def _hash(draw: random.Random) -> str:
    return f"{draw.getrandbits(160):040x}"


def _uuid(draw: random.Random) -> str:
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def _path(draw: random.Random) -> str:
    folders = "/".join(draw.sample(_WORDS, 3))
    return f"/srv/{folders}/{draw.getrandbits(32):08x}.{draw.choice(('py', 'json', 'log'))}"


def _json(draw: random.Random) -> str:
    row = {
        "id": f"{draw.getrandbits(48):012x}",
        draw.choice(_WORDS): draw.randrange(10**6),
        "tags": draw.sample(_WORDS, 2),
    }
    return json.dumps(row)


KINDS: dict[str, Callable[[random.Random], str]] = {
    "identifier": _identifier,
    "hash": _hash,
    "uuid": _uuid,
    "path": _path,
    "json": _json,
}
