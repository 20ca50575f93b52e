"""Runs the accept kernel in Triton's interpreter, in a process of its own: the interpreter must be
chosen before Triton is imported. Prints JSON: parity with the pure rules, outcomes known by hand,
p-values of the exact distribution, bytes allocated.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from scipy.stats import chisquare
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dspark.benchmarks.accept_shapes import step, steps
from sglang_dspark.kernels.accept_sampled import Tiling, accept_triton
from sglang_dspark.kernels.accept_windows import Windows
from tests.kernels.accept_reference import distribution, reference, undecided
from tests.kernels.interpreter import patch_language_once

TILINGS = (Tiling(8, 256), Tiling(16, 1024), Tiling(2, 64), Tiling(1, 256))
LARGE = ((129, 5, 33), (260, 7, 17), (300, 3, 101), (257, 6, 11), (191, 1, 2))
ROWS, VOCAB, GAMMA = 120_000, 11, 2  # of the distribution test
CUTS = {
    "uncut": {},
    "cut": {"top_k": torch.tensor(7), "top_p": torch.tensor(0.9), "min_p": torch.tensor(0.08)},
}
ALMOST_ONE = 1 - 2.0**-53
SEEDED = (1, 0)  # choices of four equals at positions 10 and 11 by the seed of `by_hand`


def parity(count: int) -> dict[str, object]:
    """`count` steps by each tiling in turn, and ten large ones; the counters are shared by all."""
    arrivals = torch.zeros(300, dtype=torch.int32)
    generator = torch.Generator().manual_seed(1)
    cases = [(f"step {i}", given, TILINGS[i % 4]) for i, given in enumerate(steps(count, 0))]
    for i, shape in enumerate(LARGE * 2):
        cases.append((f"large {i}", step(generator, *shape, turn=7 * i + 4), Tiling(128, 64)))
    report = {"requests": 0, "undecided": 0, "kept": 0, "rejected": 0}
    wrong = []
    for name, given, how in cases:
        found, expected = accept_triton(given, arrivals, how), reference(given)
        near = undecided(given, expected)
        same = (found.accepted == expected.accepted) & (found.bonus == expected.bonus)
        wrong += [f"{name}, request {r}" for r in (~same & ~near).nonzero()[:, 0].tolist()]
        report["requests"] += len(near)
        report["undecided"] += int(near.sum())
        report["kept"] += int(expected.accepted.sum())
        report["rejected"] += int((expected.accepted < given.lengths).sum())
    return {**report, "wrong": wrong, "arrivals": int(arrivals.abs().sum())}


def one(logits: list[list[float]], drafts: list[int], at: float, bonus: float, **extra: Any):
    """A request's window with the same uniform `at` for all its drafts."""
    return Windows(
        drafts=torch.tensor([drafts], dtype=torch.int64),
        lengths=torch.tensor([len(drafts)]),
        logits=torch.tensor(logits),
        temperatures=torch.ones(1),
        accept_uniforms=torch.full((1, len(drafts)), at, dtype=torch.float64),
        bonus_uniforms=torch.tensor([bonus], dtype=torch.float64),
        **{name: torch.tensor([value]) for name, value in extra.items()},
    )


def by_hand() -> dict[str, tuple[Windows, int, int]]:
    """Steps with the drafts accepted and the token behind them, at exact boundaries."""
    same, ordered = [0.0] * 4, [3.0, 2.0, 1.0, 0.0]
    rise = [0.0, 0.0, 5.0, 5.0]
    dense = drafted_by(one([rise, rise], [2], ALMOST_ONE, 0.0), rise)
    # Of the token the draft has 0.73 at its temperature, 0.88 at temperature 1, the target 0.5.
    warm = drafted_by(one([[0.0, 0.0]] * 2, [0], 0.6, 0.9), [2.0, 0.0], 2.0)
    sure = drafted_by(one([[0.0, 0.0]] * 2, [0], 0.9, 0.0), [2.0, 0.0])
    unread = replace(one([same, [torch.nan] * 4], [0], 0.0, 0.3), lengths=torch.tensor([0]))
    seed = {"seeded": True, "seeds": -(2**40) - 7, "anchors": 10}
    impossible = [-torch.inf, 0.0, 0.0, -torch.inf]
    greedy = {"greedy": True}
    return {
        "a draft that is cut, uniform 0": (one([ordered, same], [3], 0.0, 0.0, top_k=2), 0, 0),
        "a draft of half the mass, uniform 0.5": (one([[0.0, 0.0]] * 2, [0], 0.5, 0.9), 0, 1),
        "top-p 0.5 of four equals keeps three": (one([same], [], 0, ALMOST_ONE, top_p=0.5), 0, 2),
        "top-k 2 of four equals": (one([same], [], 0, ALMOST_ONE, top_k=2), 0, 1),
        "top-k 2 keeps the draft of the two": (one([same] * 2, [1], 0.4, 0.0, top_k=2), 1, 0),
        "top-k 3 with a tie at the end": (one([rise], [], 0, 1e-9, top_k=3), 0, 0),
        "min-p 1 keeps all that are likeliest": (one([rise], [], 0, 0.75, min_p=1.0), 0, 3),
        "min-p 1 keeps no other": (one([rise], [], 0, 0.0, min_p=1.0), 0, 2),
        "top-p of the first token alone": (one([ordered], [], 0, ALMOST_ONE, top_p=1e-6), 0, 0),
        "a rejected argmax is not drawn": (one([rise, same], [3], ALMOST_ONE, ALMOST_ONE), 0, 2),
        "nothing of weight 0 is drawn": (one([impossible], [], 0, ALMOST_ONE), 0, 2),
        "nothing of weight 0 is drawn first": (one([impossible], [], 0, 0.0), 0, 1),
        "the same distribution keeps the draft": (dense, 1, 0),
        "the draft's temperature keeps the draft": (warm, 1, 1),
        "a correction lacks what the draft has too often": (sure, 0, 1),
        "a draft that was not verified is not kept": (unread, 0, 1),
        "a length below 0 is 0": (replace(unread, lengths=torch.tensor([-1])), 0, 1),
        "a seed's own draft is kept": (
            one([same] * 2, [SEEDED[0]], 0.5, 0.5, **seed),
            1,
            SEEDED[1],
        ),
        "a seed keeps no other": (one([same] * 2, [SEEDED[0] ^ 1], 0.5, 0.5, **seed), 0, SEEDED[0]),
        "greedy takes the first argmax": (one([rise, same], [2], ALMOST_ONE, 0.9, **greedy), 1, 0),
        "greedy keeps no other": (one([rise, same], [3], 0.0, 0.9, **greedy), 0, 2),
    }


def drafted_by(given: Windows, logits: list[float], temperature: float = 1.0) -> Windows:
    """The window of one draft, drawn from these logits."""
    draft = {"draft_logits": torch.tensor([[logits]])}
    return replace(given, **draft, draft_temperatures=torch.full((1,), temperature))


def known() -> list[str]:
    """Names of the steps whose outcome is not the one found by hand, here or in torch."""
    wrong = []
    arrivals = torch.zeros(1, dtype=torch.int32)
    for name, (given, accepted, bonus) in by_hand().items():
        for found in (accept_triton(given, arrivals, Tiling(1, 4)), reference(given)):
            if (int(found.accepted), int(found.bonus)) != (accepted, bonus):
                wrong.append(f"{name}: {int(found.accepted)}, {int(found.bonus)}")
    return wrong


def p_values(cuts: dict[str, Tensor], seed: int) -> dict[str, float]:
    """Return p-values of the first token and of (accepted, bonus) jointly, over ROWS steps."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(1, GAMMA + 1, VOCAB, generator=generator)
    near = logits[:, :GAMMA] + torch.randn(1, GAMMA, VOCAB, generator=generator)
    draft = (near[0] / 0.9).softmax(-1)  # [gamma, V]
    drafts = torch.multinomial(draft, ROWS, replacement=True, generator=generator).T.contiguous()
    given = Windows(
        drafts=drafts,
        lengths=torch.full((ROWS,), GAMMA),
        logits=logits.expand(ROWS, -1, -1).reshape(-1, VOCAB),
        temperatures=torch.full((ROWS,), 0.7),
        accept_uniforms=torch.rand(ROWS, GAMMA, generator=generator, dtype=torch.float64),
        bonus_uniforms=torch.rand(ROWS, generator=generator, dtype=torch.float64),
        draft_logits=near.expand(ROWS, -1, -1).contiguous(),
        draft_temperatures=torch.full((ROWS,), 0.9),
        **{name: value.expand(ROWS).contiguous() for name, value in cuts.items()},
    )
    found = accept_triton(given, how=Tiling(8192, 16))
    single = replace(
        given,
        drafts=drafts[:1],
        logits=logits[0],
        temperatures=given.temperatures[:1],
        **{name: value.reshape(1) for name, value in cuts.items()},
    )
    target = distribution(single)
    return scores(target[0].double().numpy(), draft.double().numpy(), drafts.numpy(), found)


def scores(
    target: np.ndarray, draft: np.ndarray, drafts: np.ndarray, found: Any
) -> dict[str, float]:
    """target [gamma + 1, V], draft [gamma, V], drafts [N, gamma]."""
    joint = np.zeros((GAMMA + 1, VOCAB))
    reached = 1.0
    for place in range(GAMMA):
        joint[place] = reached * np.maximum(target[place] - draft[place], 0)
        reached *= np.minimum(target[place], draft[place]).sum()
    joint[GAMMA] = reached * target[GAMMA]
    accepted, bonus = found.accepted.numpy(), found.bonus.numpy()
    first = np.where(accepted > 0, drafts[:, 0], bonus)
    seen = np.bincount(accepted * VOCAB + bonus, minlength=joint.size)
    return {
        "first": chi_square(np.bincount(first, minlength=VOCAB), target[0]),
        "joint": chi_square(seen, joint.ravel()),
    }


def chi_square(seen: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value of counts; 0 if an impossible outcome was seen. Rare outcomes are pooled."""
    if seen[probabilities < 1e-9].any():
        return 0.0
    expected = probabilities / probabilities.sum() * seen.sum()
    rare = expected < 10
    pooled, own = expected[~rare], seen[~rare]
    if expected[rare].sum() >= 10:
        pooled = np.append(pooled, expected[rare].sum())
        own = np.append(own, seen[rare].sum())
    return float(chisquare(own, pooled * own.sum() / pooled.sum()).pvalue)


class Allocated(TorchDispatchMode):
    """Bytes of the tensors that were made: outputs that are neither views nor written arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not (func.is_view or func._schema.is_mutable):
            self.bytes += out.nbytes
        return out


def allocated(vocab: int, operator: Callable[..., Any] = accept_triton) -> int:
    """By one call with all that a step can ask for; 4 requests of 8 rows."""
    given = step(torch.Generator().manual_seed(0), 4, 7, vocab, turn=5)
    cut = {"top_k": torch.full((4,), 3), "min_p": torch.full((4,), 0.1)}
    counting = Allocated()
    with counting:
        operator(replace(given, **cut), how=Tiling(4, 1024))
    return counting.bytes


def answer(parts: dict[str, Callable[..., object]]) -> None:
    """Print what the part named by the first argument returns for the others, as JSON."""
    torch.set_num_threads(1)
    np.seterr(all="ignore")  # lanes behind a row's end
    name, *counts = sys.argv[1:]
    print(json.dumps(parts[name](*map(int, counts))))


def main() -> None:
    """Answer for the token rule."""
    answer(
        {
            "parity": parity,
            "distribution": lambda: {name: p_values(cuts, 3) for name, cuts in CUTS.items()},
            "known": lambda: {"wrong": known(), "bytes": [allocated(v) for v in (16, 1024)]},
        }
    )


if __name__ == "__main__":
    patch_language_once()
    main()
