"""The accept rule as a Triton operator: verdicts, cuts, seeds, draws (paper, 3.1)."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

KERNEL = "kernels/accept_sampled.py"
ROWS = "kernels/accept_rows.py"
STEP = "sglang_dspark/serving/cuda/accept.py"
BY_HAND = ("tests/kernels/test_accept_sampled.py::test_exact_boundaries_and_bytes",)
IN_A_STEP = ("tests/serving_cuda/test_accept.py::test_the_operator_emits_the_tokens_of_torch",)


def _mutant(name: str, file: str, old: str, new: str, tests: tuple[str, ...] = BY_HAND) -> Mutant:
    return Mutant(name=name, area="accept operator", file=file, old=old, new=new, tests=tests)


MUTANTS = (
    _mutant(
        "the operator draws corrections from the target's law",
        ROWS,
        "rejected &= left > 0",
        "rejected &= left < 0",
    ),
    _mutant(
        "the operator keeps a draft that was cut, at uniform 0",
        KERNEL,
        "uniform * proposed < own / mass",
        "uniform * proposed <= own / mass",
    ),
    _mutant(
        "the operator's top-p counts the token itself",
        ROWS,
        "by_mass.to(tl.int32) + 1",
        "by_mass.to(tl.int32)",
    ),
    _mutant(
        "the operator keeps the highest of equal tokens",
        ROWS,
        "rank = seen[:, None] + tl.cumsum(same, 1)",
        "rank = vocab + 1 - seen[:, None] - tl.cumsum(same, 1)",
    ),
    _mutant(
        "the operator looks for the draft among the highest of equal tokens",
        ROWS,
        "tl.where(behind < 0, same, 0)",
        "tl.where(behind > 0, same, 0)",
    ),
    _mutant(
        "the operator's min-p cuts what equals it",
        KERNEL,
        "other=0.0).to(tl.int32, bitcast=True)",
        "other=0.0).to(tl.int32, bitcast=True) + 1",
    ),
    _mutant(
        "the operator's draft has no temperature",
        KERNEL,
        "temperature = tl.load(temperatures + r, mask=active, other=1.0)",
        "temperature = tl.full([rows], 1.0, tl.float32)",
    ),
    _mutant(
        "the operator's seeds see the next position",
        KERNEL,
        "mask=drawn, other=0) + place",
        "mask=drawn, other=0) + place + 1",
    ),
    _mutant(
        "the operator verifies whole windows",
        KERNEL,
        "length = tl.load(lengths + r, mask=r < requests, other=-1).to(tl.int32)",
        "length = tl.where(r < requests, gamma, -1)",
    ),
    _mutant(
        "the operator draws an argmax that it rejected",
        ROWS,
        "token[None, :] == base[:, None]",
        "token[None, :] < 0",
    ),
    _mutant(
        "the operator's counters stay where they were",
        KERNEL,
        "tl.store(arrivals + group, 0)",
        "tl.store(arrivals + group, 1)",
    ),
    _mutant(
        "the operator is given the anchors as drafts",
        STEP,
        "lengths=lens - 1",
        "lengths=lens",
        IN_A_STEP,
    ),
    _mutant(
        "a seed is given to the request beside its own",
        STEP,
        "index_fill(0, seeds.rows, True)",
        "index_fill(0, seeds.rows - 1, True)",
        IN_A_STEP,
    ),
    _mutant(
        "a refusal of the operator is told at every step",
        STEP,
        "self._told = True",
        "self._told = False",
        IN_A_STEP,
    ),
)
