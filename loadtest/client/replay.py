"""Replay a recorded load: its times and lengths, with prompts of the mix's text.

A trace holds no text. A prompt is built from token ids of the mix, exactly as long as in the trace.
Blocks with one number in the trace are equal here, so that prompts share the prefixes that they
shared when recorded. Different blocks differ within their first few tokens, so no other prefix is
shared. Answers have the length that the trace gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.client.cell import CellPrompt
from sglang_dspark.loadtest.client.schedule import Arrival, Schedule
from sglang_dspark.loadtest.client.traces import BLOCK, RecordedLoad, Traced

DOMAIN = "trace"


@dataclass(frozen=True)
class Material:
    """Source text of prompts. pieces: token ids of the mix's texts, without special tokens."""

    pieces: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.vocabulary) < 2:
            raise DSparkError("the mix has too little text to make a trace's prompts of")

    @cached_property
    def vocabulary(self) -> tuple[int, ...]:
        """Return the token ids that occur, each once, ascending."""
        return tuple(sorted({token for piece in self.pieces for token in piece}))

    def block(self, seed: int, number: int, of: int, length: int) -> tuple[int, ...]:
        """Build block `number` of `of`: its number, then pieces in a seeded order: [length]."""
        tokens = self._mark(number, of)
        generator = np.random.default_rng([seed, number])
        while len(tokens) < length:
            for piece in generator.permutation(len(self.pieces)):
                tokens += self.pieces[piece]
        return tuple(tokens[:length])

    def _mark(self, number: int, of: int) -> list[int]:
        """Encode the number as tokens, lowest digit first: neighbours differ in the first token."""
        base, tokens = len(self.vocabulary), []
        while of > 0:
            number, digit = divmod(number, base)
            tokens.append(self.vocabulary[digit])
            of //= base
        return tokens


@dataclass(frozen=True)
class Replay:
    """A recorded load to be sent. speed: 2 is twice as fast as recorded."""

    recorded: RecordedLoad
    speed: float = 1.0

    @property
    def requests(self) -> int:
        """Count the requests sent."""
        return len(self.recorded.rows)

    @property
    def seconds(self) -> float:
        """Return the seconds from the first arrival to the last."""
        return self.recorded.seconds / self.speed

    def schedule(self) -> Schedule:
        """Schedule all requests, each with its own prompt."""
        return Schedule(
            tuple(
                Arrival(index, row.at / self.speed, index, row.answer_tokens)
                for index, row in enumerate(self.recorded.rows)
            ),
            None,
        )

    def prompts(self, material: Material, seed: int) -> tuple[CellPrompt, ...]:
        """Build the prompts as token ids, in the order of the schedule."""
        blocks = [_blocks(row) for row in self.recorded.rows]
        numbers = {key: n for n, key in enumerate(dict.fromkeys(k for b in blocks for k, _ in b))}
        made: dict[tuple[int, int], tuple[int, ...]] = {}
        prompts = []
        for row, own in zip(self.recorded.rows, blocks, strict=True):
            tokens: list[int] = []
            for key, length in own:
                place = (numbers[key], length)
                if place not in made:
                    made[place] = material.block(seed, numbers[key], len(numbers), length)
                tokens += made[place]
            prompts.append(CellPrompt(f"line-{row.line}", DOMAIN, tokens))
        return tuple(prompts)


def _blocks(row: Traced) -> Sequence[tuple[tuple[str, int], int]]:
    """List a prompt's blocks as (key, length): one unique block if the trace has none."""
    if not row.blocks:
        return [(("line", row.line), row.prompt_tokens)]
    lengths = [min(BLOCK, row.prompt_tokens - BLOCK * n) for n in range(len(row.blocks))]
    return [(("hash", block), length) for block, length in zip(row.blocks, lengths, strict=True)]
