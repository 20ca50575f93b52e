"""Warnings of a cell's answers: one chunk, far too few tokens, loops; and none for good ones."""

from __future__ import annotations

from sglang_dspark.loadtest.client.records import Record
from sglang_dspark.loadtest.sweep.answer_checks import LOOPS, ONE_CHUNK, SHORT, answer_warnings


def record(tokens: tuple[int, ...], asked: int = 64, loops: bool = False) -> Record:
    at = tuple(float(i + 1) for i in range(len(tokens)))
    return Record(0, "p", "math", "ok", None, 0.0, 9.0, at, tokens, asked=asked, loops=loops)


GOOD = record((1, 20, 20))


def test_good_answers_have_none() -> None:
    assert answer_warnings([GOOD] * 5, whole=False) == {}
    assert answer_warnings([], whole=False) == {}
    assert answer_warnings([record((1, 2), asked=0)], whole=True) == {}  # nothing known of it


def test_one_chunk_is_named_when_all_answers_are() -> None:
    whole = record((64,))
    assert list(answer_warnings([whole, whole], whole=True)) == [ONE_CHUNK]
    assert answer_warnings([whole, GOOD], whole=True) == {}
    assert list(answer_warnings([record((1,))] * 2, whole=False)) == [SHORT]  # of one token


def test_few_tokens_are_less_where_answers_were_to_be_whole() -> None:
    found = answer_warnings([record((1, 1))] * 3, whole=False)
    assert found == {SHORT: "answers are short: 2 of 64 tokens asked for (medians)"}
    for tokens, whole, named in (
        (8, False, False),
        (7, False, True),
        (32, True, False),
        (31, True, True),
    ):
        found = answer_warnings([record((1, tokens - 1))], whole)
        assert (SHORT in found) is named, (tokens, whole)
    assert SHORT not in answer_warnings([record((1, 1)), GOOD, GOOD], whole=False)  # the median


def test_loops_are_counted_from_a_tenth_on() -> None:
    one = record((1, 63), loops=True)
    found = answer_warnings([one, *[GOOD] * 9], whole=False)
    assert list(found) == [LOOPS]
    assert found[LOOPS].startswith("1 of 10 answers end in one piece of text again and again")
    assert answer_warnings([one, *[GOOD] * 10], whole=False) == {}
