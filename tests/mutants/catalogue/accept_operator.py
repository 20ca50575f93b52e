"""The accept rule as a Triton operator: verdicts, cuts, seeds, draws (paper, 3.1)."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

KERNEL = "kernels/accept_sampled.py"
VERDICTS = "kernels/accept_verdicts.py"
GREEDY = "kernels/accept_greedy.py"
ROWS = "kernels/accept_rows.py"
STEP = "sglang_dspark/backends/cuda/accept.py"
BY_HAND = ("tests/kernels/test_accept_sampled.py::test_exact_boundaries_and_bytes",)
IN_A_STEP = ("tests/backends/cuda/test_accept.py::test_the_operator_emits_the_tokens_of_torch",)

GREEDY_BY_HAND = ("tests/kernels/test_accept_greedy.py::test_outcomes_known_by_hand",)
GREEDY_PARITY = (
    "tests/kernels/test_accept_greedy.py::test_interpreted_kernel_equals_torch_and_upstream",
)
IN_A_GRAPH = ("tests/backends/cuda/test_accept.py::test_a_graph_accepts_as_upstreams_does",)


def _mutant(name: str, file: str, old: str, new: str, tests: tuple[str, ...] = BY_HAND) -> Mutant:
    return Mutant(name=name, area="accept operator", file=file, old=old, new=new, tests=tests)


MUTANTS = (
    _mutant(
        "lanes' weights are added up by different maxima",
        ROWS,
        "total = tl.sum(total * tl.exp(top - finite[:, None]).to(tl.float64), 1)",
        "total = tl.sum(total, 1)",
    ),
    _mutant(
        "the tile in which a draw lies is passed over",
        ROWS,
        "crossed = (found == 2147483647) & (below + here > goal)",
        "crossed = (found == 2147483647) & (below > goal)",
    ),
    _mutant(
        "the likeliest token is any lane's",
        ROWS,
        "tl.min(tl.where(top == high[:, None], first, 2147483647), 1)",
        "tl.min(first, 1)",
    ),
    _mutant(
        "a batch with a top-k alone forms no counts",
        VERDICTS,
        "counted: tl.constexpr = cuts[0] is not None",
        "counted: tl.constexpr = cuts[1] is not None",
    ),
    _mutant(
        "a batch with a top-p alone forms no masses",
        VERDICTS,
        "weighed: tl.constexpr = cuts[1] is not None",
        "weighed: tl.constexpr = cuts[0] is not None",
    ),
    _mutant(
        "two bits of a key are never set together",
        ROWS,
        "key | (3 << bit)",
        "key | (2 << bit)",
    ),
    _mutant(
        "weight that reaches a key counts for a larger one",
        ROWS,
        "mass_high += tl.where(bits >= high[:, None], w, 0.0)",
        "mass_high += tl.where(bits >= low[:, None], w, 0.0)",
    ),
    _mutant(
        "the operator draws corrections from the target's law",
        ROWS,
        "rejected &= left > 0",
        "rejected &= left < 0",
    ),
    _mutant(
        "the operator keeps a draft that was cut, at uniform 0",
        VERDICTS,
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
        VERDICTS,
        "other=0.0).to(tl.int32, bitcast=True)",
        "other=0.0).to(tl.int32, bitcast=True) + 1",
    ),
    _mutant(
        "the operator's draft has no temperature",
        VERDICTS,
        "temperature = tl.load(temperatures + r, mask=active, other=1.0)\n        top, mass, _ =",
        "temperature = tl.full([rows], 1.0, tl.float32)\n        top, mass, _ =",
    ),
    _mutant(
        "the operator's seeds see the next position",
        VERDICTS,
        "mask=drawn, other=0) + place",
        "mask=drawn, other=0) + place + 1",
    ),
    _mutant(
        "the operator verifies whole windows",
        VERDICTS,
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
        "self._logged = True",
        "self._logged = False",
        IN_A_STEP,
    ),
    _mutant(
        "greedy acceptance keeps a draft behind the verified rows",
        GREEDY,
        "wrong = (draft != target) | (j + 1 >= length)",
        "wrong = draft != target",
        GREEDY_PARITY,
    ),
    _mutant(
        "greedy acceptance keeps drafts behind a rejected one",
        GREEDY,
        "kept = tl.min(tl.where(wrong, j, width), 0)",
        "kept = length - tl.sum(tl.where(wrong & (j < length), 1, 0), 0)",
        GREEDY_PARITY,
    ),
    _mutant(
        "greedy acceptance takes the last of equal logits",
        GREEDY,
        "better = x > best",
        "better = x >= best",
        GREEDY_PARITY,
    ),
    _mutant(
        "greedy acceptance takes the last part of equal ones",
        GREEDY,
        "return tl.min(tl.where(top == tl.max(top, 1)[:, None], choice, 2147483647), 1)",
        "return tl.max(tl.where(top == tl.max(top, 1)[:, None], choice, -1), 1)",
        GREEDY_PARITY,
    ),
    _mutant(
        "greedy acceptance begins a token late",
        GREEDY,
        "own * part, part, vocab, block)",
        "own * part + 1, part, vocab, block)",
        GREEDY_PARITY,
    ),
    _mutant(
        "greedy acceptance leaves its counter as it is",
        GREEDY,
        "        tl.store(arrivals + r, 0)\n",
        "",
        GREEDY_PARITY,
    ),
    _mutant(
        "greedy acceptance reads the rows of an empty slot",
        GREEDY,
        "length = tl.minimum(tl.maximum(tl.load(rows + r).to(tl.int32), 1), width)",
        "length = width + 0 * tl.load(rows + r).to(tl.int32)",
        GREEDY_BY_HAND,
    ),
    _mutant(
        "greedy acceptance counts lengths without the target's own token",
        GREEDY,
        "tl.load(lens + r).to(tl.int64) + kept + 1)",
        "tl.load(lens + r).to(tl.int64) + kept)",
        GREEDY_BY_HAND,
    ),
    _mutant(
        "a graph's acceptance where ranks must agree",
        "sglang_dspark/backends/cuda/accept_in_graph.py",
        "reason = _obstacle(epilogue) or why_not(",
        "reason = why_not(",
        IN_A_GRAPH,
    ),
)
