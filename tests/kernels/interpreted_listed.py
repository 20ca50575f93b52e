"""Runs the accept kernels on lists in Triton's interpreter, in a process of its own as
`interpreted_accept`. Prints JSON: parity with the pure rules, alone and with the operators on whole
rows where lists are incomplete, ties, p-values of whole strings, bytes allocated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

# First: it has Triton interpreted.
from tests.kernels.interpreted_accept import (  # isort: skip
    ALMOST_ONE,
    Allocated,
    answer,
    by_hand,
    one,
)
from tests.kernels.interpreted_block import REQUESTS, p_value  # isort: skip

from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch

from sglang_dspark.benchmarks.accept_shapes import (
    bounds,
    rows_of,
    step,
    steps,
    with_any_cuts,
    with_lists,
)
from sglang_dspark.kernels.accept_block import accept_block_triton
from sglang_dspark.kernels.accept_listed import accept_listed_triton
from sglang_dspark.kernels.accept_sampled import Outcome, Tiling, accept_triton
from sglang_dspark.kernels.accept_windows import Windows
from sglang_dspark.verify.block import accept_block
from sglang_dspark.verify.rejection import accept_sampled
from tests.kernels.accept_reference import reference, undecided
from tests.kernels.interpreter import patch_language_once

TILINGS = (Tiling(16, 256), Tiling(16, 64), Tiling(4, 64), Tiling(1, 256))
LARGE = ((1, 17, 7), (2, 5, 3), (5, 101, 6), (7, 65, 12), (10, 33, 13), (8, 40, 31))
RULES = {"block": accept_block, "token": accept_sampled}
WHOLE_ROWS = {"block": accept_block_triton, "token": accept_triton}
SHORT = ((4,), (16,), (64,))  # lengths of lists, shorter than most vocabularies
CUT = {"top_k": torch.tensor(4), "top_p": torch.tensor(0.9), "min_p": torch.tensor(0.02)}
WALL, BACK = slice(None, 64), slice(-64, None)
CHOICES = ((1, 0.5), (2, 0.0), (4, 0.3), (32, 0.6), (32, 0.999), (101, 0.9), (256, 0.95))
LOOSE = {"top_p": torch.tensor(0.8), "min_p": torch.tensor(0.02)}


def cases(count: int) -> Iterator[tuple[str, Windows, Tiling]]:
    """`count` odd steps by each tiling in turn, and large ones."""
    generator = torch.Generator().manual_seed(1)
    for i, given in enumerate(steps(count, 0)):
        listed = with_lists(given, i)
        yield f"step {i}", strided(listed) if i % 3 == 1 else listed, TILINGS[i % 4]
    for i, (gamma, vocab, turn) in enumerate(LARGE):
        given = step(generator, REQUESTS, gamma, vocab, turn)
        yield f"large {i}", with_lists(given, i), Tiling(512, 64)


def strided(given: Windows) -> Windows:
    """The step with rows that are parts of longer ones, as a padded vocabulary's are."""
    wide = torch.nn.functional.pad(given.logits, (0, 3), value=torch.nan)
    found = replace(given, logits=wide[:, :-3])
    if given.draft_logits is None:
        return found
    deep = torch.nn.functional.pad(given.draft_logits, (0, 5, 0, 1), value=torch.nan)
    return replace(found, draft_logits=deep[:, :-1, :-5])


def parity(count: int) -> dict[str, object]:
    """Both rules in turn."""
    report = dict.fromkeys(("requests", "undecided", "kept", "rejected", "tied", "apart"), 0)
    wrong = []
    for i, (name, given, how) in enumerate(cases(count)):
        rule, pure = list(RULES.items())[i // 4 % 2]
        most, rows = bounds(given)
        found = accept_listed_triton(given, most=most, rows=rows + i % 3, rule=rule, how=how)
        expected = reference(given, pure)
        near = undecided(given, expected, pure)
        same = (found.accepted == expected.accepted) & (found.bonus == expected.bonus)
        wrong += [f"{name}, request {r}" for r in (~same & ~near).nonzero()[:, 0].tolist()]
        other = reference(given, RULES["token" if rule == "block" else "block"])
        report["requests"] += len(near)
        report["undecided"] += int(near.sum())
        report["kept"] += int(expected.accepted.sum())
        report["rejected"] += int((expected.accepted < given.lengths).sum())
        report["apart"] += int((other.accepted != expected.accepted).sum())
        report["tied"] += len(near) * int(bool((given.logits == given.logits.round()).any()))
    return {**report, "wrong": wrong}


def together(
    given: Windows, rule: str, how: Tiling, lists_of: tuple[int, ...], spare: int = 0
) -> tuple[Outcome, int]:
    """Outcomes by lists, and of requests with an incomplete one by whole rows; how many those
    are. What is to be overwritten is -1 before."""
    listed = accept_listed_triton(
        given, most=None, rows=rows_of(given) + spare, rule=rule, how=how, lists_of=lists_of
    )
    rest = ~listed.complete
    into = Outcome(*(each.masked_fill(rest, -1) for each in listed[:2]))
    found = WHOLE_ROWS[rule](replace(given, skipped=listed.complete), None, how, into)
    return found, int(rest.sum())


def incomplete(count: int) -> dict[str, object]:
    """Odd steps with any cuts, or none, and seeds, on lists that are too short for some."""
    report = dict.fromkeys(("requests", "incomplete", "complete", "seeded", "undecided"), 0)
    wrong = []
    for i, drawn in enumerate(steps(count, 5)):
        given, (rule, pure) = with_any_cuts(drawn), list(RULES.items())[i // 2 % 2]
        found, rest = together(given, rule, TILINGS[i % 4], SHORT[i % 3], spare=i % 3)
        expected = reference(given, pure)
        near = undecided(given, expected, pure)
        same = (found.accepted == expected.accepted) & (found.bonus == expected.bonus)
        wrong += [f"step {i}, request {r}" for r in (~same & ~near).nonzero()[:, 0].tolist()]
        report["requests"] += len(near)
        report["incomplete"] += rest
        report["complete"] += len(near) - rest
        report["seeded"] += 0 if given.seeded is None else int(given.seeded.sum())
        report["undecided"] += int(near.sum())
    return {**report, "wrong": wrong}


def by_both(given: Windows, how: Tiling) -> Outcome:
    """As `accept_block_triton` is called; a third of the strings need whole rows."""
    found, rest = together(given, "block", how, (2,))
    assert 0.1 < rest / len(given.drafts) < 0.9, rest
    return found


def equals() -> list[str]:
    """Rows whose likeliest tokens are equal, in a list that holds them and in one that does not:
    which are drawn."""
    wrong = []
    vocab = 700
    for every in (7, 3):  # tokens 5, 5 + every, ...: 100 or 232 equals; a list of 32 holds 128
        logits = torch.zeros(1, vocab)
        logits[0, 5::every] = 3.0
        logits[0, 690] = 4.0
        for k, uniform in CHOICES:
            given = one(logits.tolist(), [], 0.0, uniform, top_k=k)
            found = accept_listed_triton(given, most=k, rows=1, rule="block", how=Tiling(1, 64))
            if not bool(found.complete) or int(found.bonus) != int(reference(given).bonus):
                wrong.append(f"top-k {k}: {int(found.bonus)}")
    return wrong


def hand_made() -> list[str]:
    """Names of the steps of `by_hand` whose outcome on short and long lists is another one."""
    wrong = []
    for name, (given, accepted, bonus) in by_hand().items():
        for lists_of in ((2,), (32,)):
            found, _ = together(given, "token", Tiling(1, 4), lists_of)
            if (int(found.accepted), int(found.bonus)) != (accepted, bonus):
                wrong.append(f"{name}, lists of {lists_of}")
    return wrong


def endings() -> list[str]:
    """Name the cases whose list is not as complete as it should be, or has another token drawn."""
    flat, peaked = [0.0] * 200, [20.0, 19.5, *[0.0] * 198]
    near = [0.1, 0.1 + 7.5e-9, *[0.0] * 198]  # two floats whose weights are one
    halves = [0.0, 0.0, *[math.log(0.5)] * 4, *[-200.0] * 194]
    # logits, settings, complete on a list of 32, uniform, the token drawn
    cases = (
        ("equal tokens outside the list", flat, {"top_p": 0.9}, False, 0.0, 0),
        ("min-p drops tokens of the list", peaked, {"min_p": 0.5}, True, ALMOST_ONE, 1),
        ("top-k and min-p end at equals", flat, {"top_k": 2, "min_p": 1.0}, True, ALMOST_ONE, 1),
        ("top-p of half, which two tokens have", halves, {"top_p": 0.5}, True, ALMOST_ONE, 2),
        ("half of two equals", halves, {"top_k": 2}, True, 0.5, 1),
        ("greedy, one weight", near, {"top_k": 1, "greedy": True}, True, ALMOST_ONE, 1),
    )
    wrong = []
    for name, logits, settings, complete, uniform, token in cases:
        given = one([logits], [], 0.0, uniform, **settings)
        listed = accept_listed_triton(
            given, most=None, rows=1, rule="token", how=Tiling(1, 64), lists_of=(32,)
        )
        found, _ = together(given, "token", Tiling(1, 64), (32,))
        if bool(listed.complete) != complete or int(found.bonus) != token:
            wrong.append(f"{name}: complete {bool(listed.complete)}, {int(found.bonus)}")
    return wrong


def edges() -> list[str]:
    """Cases in which something is written outside the lists, or a token is listed that is none."""
    wrong = []
    equal, few = torch.zeros(3, 300), torch.tensor([[1.0, 0.0, -1.0]] * 3)
    for name, logits, k in (("equal", equal, 20), ("few tokens", few, 4)):
        given = Windows(
            drafts=torch.zeros(3, 0, dtype=torch.int64),
            lengths=torch.zeros(3, dtype=torch.int32),
            logits=logits,
            temperatures=torch.ones(3),
            accept_uniforms=torch.zeros(3, 0, dtype=torch.float64),
            bonus_uniforms=torch.full((3,), 0.5, dtype=torch.float64),
            top_k=torch.full((3,), k, dtype=torch.int32),
        )
        made: list[torch.Tensor] = []
        with mock.patch.object(torch, "empty", partial(walled, torch.empty, made)):
            accept_listed_triton(given, most=k, rows=3, rule="block", how=Tiling(1, 64))
        walls = torch.cat([each[part].double() for each in made for part in (WALL, BACK)])
        inner = {each.dtype: each[64:-64].view(3, -1) for each in made if each.dtype != torch.uint8}
        counts, tokens = inner[torch.float64][:, 4], inner[torch.int32]
        listed = torch.cat([tokens[r, : int(counts[r])] for r in range(3)])
        if not bool((walls == 7).all()) or not bool((listed < logits.shape[1]).all()):
            wrong.append(f"{name}: {listed.max()}")
    return wrong


def walled(
    empty: Callable[..., torch.Tensor], made: list[torch.Tensor], *shape: Any, **options: Any
) -> torch.Tensor:
    """As torch.empty, with 64 sevens in front and behind, all of which goes to `made`."""
    sizes = tuple(shape[0]) if isinstance(shape[0], tuple) else shape
    whole = empty(math.prod(sizes) + 128, **options).fill_(7)
    made.append(whole)
    return whole[64:-64].view(sizes)


def by_block(given: Windows, arrivals: object = None, how: Tiling = TILINGS[0]) -> Outcome:
    """As `accept_block_triton` is called."""
    most, rows = bounds(given)
    return accept_listed_triton(given, most=most, rows=rows, rule="block", how=how)


def sizes() -> dict[int, int]:
    """Bytes that a call allocates by vocabulary: 4 requests of 8 rows."""
    found = {}
    for vocab in (64, 1024):
        drawn = step(torch.Generator().manual_seed(0), 4, 7, vocab, turn=5)
        given = replace(with_lists(drawn, 0), lengths=torch.full((4,), 7, dtype=torch.int32))
        counting = Allocated()
        with counting:
            by_block(given, how=Tiling(4, 1024))
        found[vocab] = counting.bytes
    return found


def main() -> None:
    """Answer for lists."""
    answer(
        {
            "parity": parity,
            "incomplete": incomplete,
            "strings": lambda: {
                "cut": p_value(CUT, 3, by_block),
                "loose": p_value(LOOSE, 4, by_both),
            },
            "known": lambda: {
                "wrong": [*equals(), *hand_made(), *endings(), *edges()],
                "bytes": sizes(),
            },
        }
    )


if __name__ == "__main__":
    patch_language_once()
    main()
