"""Runs the draft steps' kernel in Triton's interpreter, in a process of its own: the interpreter
must be chosen before Triton is imported. Prints JSON: parity with the reference, drafts known by
hand, p-values of the drafts' distribution.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from scipy.stats import chisquare
from torch import Tensor

from sglang_dspark.benchmarks.markov_shapes import Batch, batch, batches, compared
from sglang_dspark.kernels.markov_blocks import Blocks, Mixing, Noise
from sglang_dspark.kernels.markov_reference import markov_torch
from sglang_dspark.kernels.markov_sample import Launch, markov_triton, waits
from tests.kernels.interpreter import patch_language_once

TOGETHER = Launch(block=256)  # one program, all steps
APART = (  # several programs, a launch for each phase
    Launch(rows=16, block=32, ranks=16, programs=3, split=True),
    Launch(rows=16, block=64, ranks=32, programs=2, split=True),
)
LAUNCHES = (TOGETHER, APART[0], Launch(rows=32, block=64, ranks=16), APART[1])
LARGE = ((257, 2, 33), (300, 3, 64), (190, 2, 129), (260, 1, 65), (220, 3, 17), (311, 2, 40))
ROWS, VOCAB, KEPT, RANK = 150_000, 17, 9, 4  # of the distribution test
WARM = 0.6, 1.7  # temperatures of the distribution test
INFINITE, NAN = float("inf"), float("nan")


def cases(count: int) -> Iterator[tuple[str, Batch, Launch]]:
    """`count` odd batches by each launch in turn, and large ones both ways."""
    for number, given in enumerate(batches(count, 0)):
        yield f"batch {number}", given, LAUNCHES[number % 4]
    generator = torch.Generator().manual_seed(1)
    for number, shape in enumerate(LARGE * 2):
        way = Launch(rows=128, block=64, ranks=32, programs=2, split=number % 2 > 0)
        way = way if way.split else way._replace(programs=None)
        yield f"large {number}", batch(generator, *shape, turn=11 * number + 3), way


def parity(count: int) -> dict[str, object]:
    """The scratch is shared by all."""
    scratch = torch.zeros(1 + 300 * 9, dtype=torch.int64)
    report = {"blocks": 0, "drafts": 0, "undecided": 0, "split": 0, "sampled": 0}
    wrong = []
    for name, given, how in cases(count):
        found = markov_triton(given.blocks, scratch, how)
        outcome = compared(given, found)
        wrong += [f"{name}: {line}" for line in outcome.wrong]
        report["blocks"] += len(found.tokens)
        report["drafts"] += found.tokens.numel()
        report["undecided"] += int(outcome.undecided.sum())
        report["split"] += len(found.tokens) * how.split
        if given.blocks.temperatures is not None:
            report["sampled"] += int((given.blocks.temperatures > 0).sum())
        if bool(scratch.any()):
            wrong.append(f"{name}: the scratch is not zero behind it")
            scratch.zero_()
    return {**report, "wrong": wrong}


def chain(steps: int, **extra: Any) -> Blocks:
    """Four tokens, each of which is followed by the next one; the anchor is token 1."""
    following = torch.eye(4).roll(1, 0)
    base = torch.zeros(1, steps, 4)
    return Blocks(base, torch.tensor([1]), torch.eye(4), 3 * following, **extra)


def flat(logits: list[float], dtype: torch.dtype = torch.float32, steps: int = 1) -> Blocks:
    """Positions of these logits, which no token in front changes."""
    zeros = torch.zeros(len(logits), 1, dtype=dtype)
    base = torch.tensor([[logits] * steps], dtype=dtype)
    return Blocks(base, torch.tensor([0]), zeros, zeros)


def by_hand() -> dict[str, tuple[Blocks, list[int]]]:
    """Blocks with the drafts found by hand."""
    cold = {"temperatures": torch.tensor([1e-5]), "noise": Noise(5, torch.tensor([3]))}
    ids = torch.tensor([0, 2, 3])
    part = chain(5)
    reduced = replace(part, base=part.base[..., ids], w2=part.w2[ids], draft_ids=ids)
    # A gate of 0 before W1: half of it is left, so base 2 of token 0 is above 3 / 2.
    shut = Mixing(torch.zeros(1, 2, 4), torch.zeros(4, 4))
    gated = replace(chain(2), base=torch.tensor([[[2.0, 0, 0, 0]] * 2]), mixing=shut)
    return {
        "each token follows the one in front": (chain(6), [2, 3, 0, 1, 2, 3]),
        "so it does at a low temperature": (chain(6, **cold), [2, 3, 0, 1, 2, 3]),
        "a reduced vocabulary's columns have ids": (reduced, [2, 3, 0, 0, 0]),
        "a gate halves": (gated, [0, 0]),
        **orders(),
    }


def orders() -> dict[str, tuple[Blocks, list[int]]]:
    """One step each: numbers of every kind, equals, sums that rounding decides."""
    ties = [0.0] * 40
    for place in (3, 20, 35):
        ties[place] = 1.0
    high = flat([256.0, 256.0], torch.bfloat16)
    rounded = replace(high, w1=high.w1 + 1, w2=torch.tensor([[0.0], [1.0]], dtype=torch.bfloat16))
    # 257 lies between two numbers of bfloat16 and becomes 256.
    bias = torch.tensor([[256.0, 1.0], [0.0, 0.0]], dtype=torch.bfloat16)
    coarse = replace(flat([0.0, 256.5]), w1=torch.ones_like(bias), w2=bias)
    # The bias of the second, too small for float16, becomes a zero below zero.
    tiny = torch.tensor([[0.0], [-1e-4], [0.0]], dtype=torch.float16)
    below = replace(flat([-1.0, -0.0, 0.0], torch.float16), w1=-tiny.roll(-1, 0), w2=tiny)
    return {
        "the lowest of equals in three tiles": (flat(ties), [3]),
        "zeros of either sign are equal": (below, [1]),
        "the lowest where nothing is possible": (flat([-INFINITE] * 3), [0]),
        "negative numbers have their order": (flat([-2.0, -1.0, -3.0]), [1]),
        "NaN comes first": (flat([1.0, NAN, INFINITE, NAN]), [1]),
        "so it does with a sign": (flat([1.0, -NAN, INFINITE, NAN]), [1]),
        "infinity is above all": (flat([1.0, 3e38, INFINITE]), [2]),
        "sums that bfloat16 rounds together are equal": (rounded, [0]),
        "a bias is rounded before it is added": (coarse, [1]),
    }


def known() -> list[str]:
    """Names of the blocks whose drafts are not those found by hand, by either way or in torch."""
    wrong = []
    scratch = torch.zeros(7, dtype=torch.int64)
    for name, (given, tokens) in by_hand().items():
        for how in (Launch(16, 16, 16), Launch(16, 16, 16, programs=3, split=True)):
            found = markov_triton(given, scratch, how).tokens[0].tolist()
            if found != tokens or bool(scratch.any()):
                wrong.append(f"{name}: {found}")
        if markov_torch(given).tokens[0].tolist() != tokens:
            wrong.append(f"{name}, in torch")
    return wrong + kept_by_hand() + far_waits()


def kept_by_hand() -> list[str]:
    """Of a reduced vocabulary's logits: by token id, and nothing else."""
    given = by_hand()["a reduced vocabulary's columns have ids"][0]
    kept = torch.full((1, 5, 4), NAN)
    markov_triton(replace(given, logits=kept), how=Launch(16, 16, 16))
    expected = torch.zeros(5, 4)
    expected[:, 1] = NAN  # no column
    expected[[0, 1, 2], [2, 3, 0]] = 3.0  # what follows each of the first three
    same = torch.allclose(kept[0], expected, equal_nan=True)
    return [] if same else [f"logits: {kept[0].tolist()}"]


@triton.jit
def _waits_kernel(out, key, offset, tile, rows: tl.constexpr, block: tl.constexpr):
    r = tl.arange(0, rows)
    found = waits(key, offset, tile, r, tile, rows, block)  # step 0 of tile 0
    tl.store(out + r[:, None] * block + tl.arange(0, block)[None, :], found)


def far_waits() -> list[str]:
    """Says by which part of itself an exponential variable is off, if it is too large."""
    shape, noise = (64, 256), Noise(2**40 + 7, torch.tensor([3]))
    found = torch.empty(shape)
    _waits_kernel[(1,)](found, noise.key, noise.offset, 0, *shape)
    zeros = torch.zeros(shape[1], 1)
    given = Blocks(torch.zeros(64, 1, 256), torch.zeros(64, dtype=torch.int64), zeros, zeros)
    raced = replace(given, temperatures=torch.ones(64), noise=noise)
    expected = (-markov_torch(raced).keys[:, 0]).exp()  # keys are 0 / 1 - log e
    off = float(((found - expected) / expected).abs().max())
    return [] if off < 4e-6 else [f"waits: {off}"]


def p_values(temperature: float, seed: int, gated: bool) -> dict[str, float]:
    """Return p-values of the first draft and of both drafts of ROWS blocks, reduced vocabulary.

    The expected distribution follows from the definition of the kept logits.
    """
    generator = torch.Generator().manual_seed(seed)
    kept = torch.randperm(VOCAB, generator=generator)[:KEPT].sort().values
    w1, w2 = (torch.randn(VOCAB, RANK, generator=generator) for _ in range(2))
    base = torch.randn(1, 2, KEPT, generator=generator).expand(ROWS, -1, -1)
    given = Blocks(base, torch.full((ROWS,), 3), w1, w2[kept], draft_ids=kept)
    if gated:
        hidden = torch.randn(1, 2, RANK, generator=generator).expand(ROWS, -1, -1)
        given = replace(given, mixing=Mixing(hidden, torch.randn(RANK, RANK, generator=generator)))
    warm = torch.full((ROWS,), temperature)
    drawn = replace(given, temperatures=warm, noise=Noise(seed + 2**40, torch.tensor([2**33 + 5])))
    tokens = markov_triton(drawn, how=Launch(rows=16384, block=16, ranks=16)).tokens
    columns = torch.searchsorted(kept, tokens)
    first, second = distribution(given, kept, temperature)
    seen = torch.bincount(columns[:, 0] * KEPT + columns[:, 1], minlength=KEPT * KEPT)
    one = seen.view(KEPT, KEPT).sum(1).numpy()
    return {
        "first": p_value(one, first.numpy()),
        "both": p_value(seen.numpy(), (first[:, None] * second).flatten().numpy()),
    }


def distribution(given: Blocks, kept: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """float64 distribution of the first column [n], and of the second by the first [n, n]."""
    mixing = given.mixing
    few = replace(
        given,
        base=given.base[:KEPT],
        anchors=given.anchors[:KEPT],
        mixing=None if mixing is None else replace(mixing, from_hidden=mixing.from_hidden[:KEPT]),
    )
    forced = torch.stack([kept, kept], 1)  # block i drafts the i-th token first
    distributions = (markov_torch(few, forced).logits.double() / temperature).softmax(-1)
    return distributions[0, 0], distributions[:, 1]


def p_value(seen: np.ndarray, probabilities: np.ndarray) -> float:
    """p-value of counts against their distribution; rare outcomes are pooled."""
    expected = probabilities / probabilities.sum() * seen.sum()
    rare = expected < 10
    pooled, own = expected[~rare], seen[~rare]
    if expected[rare].sum() >= 10:
        pooled, own = np.append(pooled, expected[rare].sum()), np.append(own, seen[rare].sum())
    return float(chisquare(own, pooled * own.sum() / pooled.sum()).pvalue)


def main() -> None:
    """Print the report that the first argument names."""
    torch.set_num_threads(1)
    np.seterr(all="ignore")  # Philox wraps around; lanes behind a row's end
    asked = sys.argv[1]
    if asked == "parity":
        print(json.dumps(parity(int(sys.argv[2]))))
    elif asked == "distribution":
        cold, warm = WARM
        print(json.dumps({"vanilla": p_values(cold, 3, False), "gated": p_values(warm, 4, True)}))
    else:
        print(json.dumps({"wrong": known()}))


if __name__ == "__main__":
    patch_language_once()
    main()
