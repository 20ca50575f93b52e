"""Runs the block accept kernels in Triton's interpreter, in a process of its own as
`interpreted_accept`. Prints JSON: parity with the pure rules, outcomes known by hand, p-values of
whole strings, bytes allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

# First: it has Triton interpreted.
from tests.kernels.interpreted_accept import CUTS, allocated, answer, chi_square  # isort: skip

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.benchmarks.accept_shapes import step, steps
from sglang_dspark.kernels.accept_block import accept_block_triton
from sglang_dspark.kernels.accept_sampled import Outcome, Tiling
from sglang_dspark.kernels.accept_windows import Windows
from sglang_dspark.verify.block import accept_block
from tests.kernels.accept_reference import distribution, reference, undecided
from tests.kernels.interpreter import patch_language_once

TILINGS = (Tiling(16, 256), Tiling(16, 64), Tiling(4, 64), Tiling(1, 256))
REQUESTS = 270  # of a large step
TURNS = (0, 1, 2, 5, 7, 10, 8, 13)  # every cut, greedy and seeded requests: a large step each
STRINGS, VOCAB, GAMMA = 100_000, 5, 3  # of the distribution test
ALMOST_ONE = 1 - 2.0**-53
Rule = Callable[..., Outcome]


def cases(count: int) -> Iterator[tuple[str, Windows, Tiling]]:
    """`count` odd steps by each tiling in turn; large ones of 1 to 8 drafts."""
    generator = torch.Generator().manual_seed(1)
    for i, given in enumerate(steps(count, 0)):
        yield f"step {i}", given, TILINGS[i % 4]
    for i, turn in enumerate(TURNS):
        yield f"large {i}", step(generator, REQUESTS, 1 + i, 5 + 4 * i, turn), Tiling(512, 64)


def parity(count: int) -> dict[str, object]:
    """The counters are shared by all steps. whole: requests that the block rule judged; apart: of
    those the ones whose outcome is another token by token."""
    arrivals = torch.zeros(REQUESTS, dtype=torch.int32)
    report = dict.fromkeys(("requests", "undecided", "whole", "apart", "kept", "rejected"), 0)
    wrong = []
    for name, given, how in cases(count):
        found = accept_block_triton(given, arrivals, how)
        expected = reference(given, accept_block)
        near = undecided(given, expected, accept_block)
        same = (found.accepted == expected.accepted) & (found.bonus == expected.bonus)
        wrong += [f"{name}, request {r}" for r in (~same & ~near).nonzero()[:, 0].tolist()]
        single = reference(given)
        apart = (single.accepted != expected.accepted) | (single.bonus != expected.bonus)
        report["requests"] += len(near)
        report["undecided"] += int(near.sum())
        report["whole"] += int(_whole(given).sum())
        report["apart"] += int(apart.sum())
        report["kept"] += int(expected.accepted.sum())
        report["rejected"] += int((expected.accepted < given.lengths).sum())
    return {**report, "wrong": wrong, "arrivals": int(arrivals.abs().sum())}


def _whole(given: Windows) -> Tensor:
    """[R] bool, requests whose window is judged as a whole."""
    whole = torch.full((len(given.drafts),), given.draft_logits is not None)
    for others in (given.greedy, given.seeded):
        whole = whole if others is None else whole & ~others
    return whole


def window(
    target: list[list[float]],
    drafter: list[list[float]],
    drafts: list[int],
    uniforms: list[float],
    bonus: float,
    length: int | None = None,
) -> Windows:
    """Build a request's window from the distributions of its rows."""
    return Windows(
        drafts=torch.tensor([drafts]),
        lengths=torch.tensor([len(drafts) if length is None else length]),
        logits=torch.tensor(target).log(),
        temperatures=torch.ones(1),
        accept_uniforms=torch.tensor([uniforms], dtype=torch.float64),
        bonus_uniforms=torch.tensor([bonus], dtype=torch.float64),
        draft_logits=torch.tensor([drafter]).log(),
        draft_temperatures=torch.ones(1),
    )


def by_hand() -> dict[str, tuple[Windows, int, int]]:
    """Steps with the drafts kept and the token behind them.

    Of the first two drafts p_1 = 1/2, and p_2 = 1 where the second has twice the target's favour.
    Of `middle` p_1 = 1/2, p_2 = 1/5, S_1 = 1/20: h_1 = 1/11. The residual of p_t alone would have
    token 2 as well.
    """
    less, half, last = [0.25, 0.75, 0.0], [0.5, 0.5, 0.0], [0.0, 0.25, 0.75]
    makes_up = [less, half, last], [half, [0.25, 0.75, 0.0]], [0, 0]
    row = [0.2, 0.4, 0.4], [0.5, 0.15, 0.35]
    middle = [less, row[0], last], [half, row[1]], [0, 0]
    same = [half, half, last], [half, half]
    unread = replace(window(*makes_up, [0.6, 0.0], 0.5), lengths=torch.tensor([1]))
    unread.logits[2] = torch.nan
    nothing = replace(window(*makes_up, [0.0, 0.0], 0.2), lengths=torch.tensor([0]))
    nothing.logits[1:] = torch.nan
    three = [less, row[0], half, last], [half, row[1], half], [0, 0, 2]
    cut = {"top_k": torch.tensor([1])}
    return {
        "a draft makes up for the one before it": (window(*makes_up, [0.9, 0.99], 0.1), 2, 1),
        "a draft's favour goes no further": (
            window([half, less, last], [less, half], [0, 0], [0.5, 0.6], 0.5),
            1,
            1,
        ),
        "the end of a window draws from the target": (window(*makes_up, [0.9, 0.9], 0.9), 2, 2),
        "a window cut before the draft that makes up": (unread, 0, 1),
        "nothing verified": (nothing, 0, 0),
        "a length below 0 is 0": (replace(nothing, lengths=torch.tensor([-1])), 0, 0),
        "a part is kept": (window(*middle, [0.09, 0.3], ALMOST_ONE), 1, 1),
        "a part is not kept": (window(*middle, [0.092, 0.3], 0.5), 0, 1),
        "all is kept for any uniform of the part": (window(*middle, [0.99, 0.19], 0.1), 2, 1),
        "all is not kept": (window(*middle, [0.99, 0.21], 0.1), 0, 1),
        # p_3 = 0 and S_2 = 0, p_2 = 1/5: nothing of the third row is left, so h_2 = 0.
        "the part before the last": (window(*three, [0.09, 0.0, 0.0], 0.0), 1, 1),
        "0 / 0 keeps no draft, and the part before it": (
            window(*same, [0, 2], [ALMOST_ONE, 0.0], 0.6),
            1,
            1,
        ),
        "equal distributions keep all": (window(*same, [0, 1], [ALMOST_ONE] * 2, 0.9), 2, 2),
        "a draft that is cut, uniform 0": (
            replace(window([less, half], [half], [0], [0.0], 0.3), **cut),
            0,
            1,
        ),
    }


def known() -> list[str]:
    """Names of the steps whose outcome is not the one found by hand, here or in torch."""
    wrong = []
    arrivals = torch.zeros(1, dtype=torch.int32)
    for name, (given, accepted, bonus) in by_hand().items():
        made = accept_block_triton(given, arrivals, Tiling(1, 2))
        inside = replace(given, lengths=given.lengths.clamp_min(0))
        for found in (made, reference(inside, accept_block)):
            if (int(found.accepted), int(found.bonus)) != (accepted, bonus):
                wrong.append(f"{name}: {int(found.accepted)}, {int(found.bonus)}")
    return wrong


def p_value(cuts: dict[str, Tensor], seed: int, rule: Rule = accept_block_triton) -> float:
    """Return the p-value of the strings of GAMMA + 1 tokens that STRINGS steps begin.

    Plain decoding completes each string. Distributions depend on the token before. Each verify
    length has a part of the steps.
    """
    generator = torch.Generator().manual_seed(seed)
    tables = 1.2 * torch.randn(GAMMA + 1, VOCAB, VOCAB, generator=generator)
    near = tables[:GAMMA] + torch.randn(GAMMA, VOCAB, VOCAB, generator=generator)
    target = distribution(_rows(tables.view(-1, VOCAB), cuts))[:, 0].view(tables.shape)

    def drawn(table: Tensor, before: Tensor) -> Tensor:
        return torch.multinomial(table[before], 1, generator=generator)[:, 0]

    path = [torch.zeros(STRINGS, dtype=torch.int64)]  # the anchor, then the drafts
    for place in range(GAMMA):
        path.append(drawn((near[place] / 0.9).softmax(-1), path[-1]))
    given = Windows(
        drafts=torch.stack(path[1:], 1),
        lengths=torch.arange(STRINGS) % (GAMMA + 1),
        logits=torch.stack([tables[k][path[k]] for k in range(GAMMA + 1)], 1).view(-1, VOCAB),
        temperatures=torch.full((STRINGS,), 0.7),
        accept_uniforms=torch.rand(STRINGS, GAMMA, generator=generator, dtype=torch.float64),
        bonus_uniforms=torch.rand(STRINGS, generator=generator, dtype=torch.float64),
        draft_logits=torch.stack([near[k][path[k]] for k in range(GAMMA)], 1),
        draft_temperatures=torch.full((STRINGS,), 0.9),
        **{name: value.expand(STRINGS).contiguous() for name, value in cuts.items()},
    )
    found = rule(given, how=Tiling(32768, 8))
    assert bool((found.accepted <= given.lengths).all())
    token, cell = path[0], torch.zeros_like(path[0])
    for place in range(GAMMA + 1):
        more = drawn(target[place], token)
        token = torch.where(place == found.accepted, found.bonus, more)
        if place < GAMMA:
            token = torch.where(place < found.accepted, given.drafts[:, place], token)
        cell = cell * VOCAB + token
    chances = target[0, 0].double()  # [V], then [V, V], ...
    for table in target[1:].double():
        chances = chances[..., None] * table
    seen = np.bincount(cell.numpy(), minlength=VOCAB ** (GAMMA + 1))
    return chi_square(seen, chances.flatten().numpy())


def _rows(logits: Tensor, cuts: dict[str, Tensor]) -> Windows:
    """Windows without drafts, one a row, with the settings of the distribution test's steps."""
    count = len(logits)
    return Windows(
        drafts=torch.zeros(count, 0, dtype=torch.int64),
        lengths=torch.zeros(count, dtype=torch.int64),
        logits=logits,
        temperatures=torch.full((count,), 0.7),
        accept_uniforms=torch.zeros(count, 0, dtype=torch.float64),
        bonus_uniforms=torch.zeros(count, dtype=torch.float64),
        **{name: value.expand(count).contiguous() for name, value in cuts.items()},
    )


def sizes() -> list[int]:
    """Bytes allocated for a narrow vocabulary and a wide one."""
    return [allocated(vocab, accept_block_triton) for vocab in (16, 1024)]


def main() -> None:
    """Answer for the block rule."""
    answer(
        {
            "parity": parity,
            "distribution": lambda: {name: p_value(cuts, 3) for name, cuts in CUTS.items()},
            "known": lambda: {"wrong": known(), "bytes": sizes()},
        }
    )


if __name__ == "__main__":
    patch_language_once()
    main()
