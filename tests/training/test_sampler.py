"""Sequences to learn from, drawn from a store whose answers differ in length."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.training.sampler import Sampler
from sglang_dspark.training.store import StoreReader


class Stored:
    """A reader of answers of these lengths, each from position 10 on."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.path = Path("store")
        self.lengths = lengths
        self.rows = [{"tokens": length} for length in lengths]

    def __len__(self) -> int:
        return len(self.lengths)

    def refresh(self) -> None:
        pass

    def answers(self, index: int) -> list[tuple[int, int]]:
        return [(10, 10 + self.lengths[index])]


def sampler_of(lengths: Sequence[int], held_out_every: int = 99) -> Sampler:
    return Sampler(cast(StoreReader, Stored(lengths)), held_out_every, seed=1)


def test_each_pass_draws_every_usable_sequence_once() -> None:
    """Of two tokens nothing is learned: an anchor, a drafted token and one behind it are three."""
    sampler = sampler_of([5, 2, 3, 0, 9, 4], held_out_every=6)  # the last one is held out
    first = [draw.index for draw in sampler.draw(3, 2)]
    second = [draw.index for draw in sampler.draw(3, 2)]
    assert sorted(first) == sorted(second) == [0, 2, 4]


def test_anchors_have_a_token_of_the_answer_behind_them() -> None:
    for draw in sampler_of([3, 8]).draw(6, 5):
        last = 10 + [3, 8][draw.index] - 2
        assert len(draw.anchors) == 5
        assert draw.anchors.min() >= 10
        assert draw.anchors.max() <= last


def test_a_store_with_nothing_to_learn_from_is_refused() -> None:
    with pytest.raises(DSparkError, match="store: no answer has 3 tokens to learn from"):
        sampler_of([2, 1, 0]).draw(1, 4)


def test_a_few_short_answers_are_passed_over() -> None:
    assert [draw.index for draw in sampler_of([2, 2, 2, 7]).draw(4, 1)] == [3, 3, 3, 3]


def test_a_restored_sampler_goes_on_as_the_first() -> None:
    one, other = sampler_of([5, 4, 3, 9]), sampler_of([5, 4, 3, 9])
    one.draw(2, 2)
    other.restore(one.state())
    again = [(draw.index, draw.anchors.tolist()) for draw in other.draw(5, 3)]
    assert again == [(draw.index, draw.anchors.tolist()) for draw in one.draw(5, 3)]
