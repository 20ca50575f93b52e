"""Time all operators of a step on a CUDA device: `python -m sglang_dspark.benchmarks.operators`.

The most valuable comparison is first. `compile_share` compiles the kernels of `candidates`: Triton
keeps compiled kernels on disk, so several processes can compile for the process that times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from sglang_dspark.benchmarks import (
    accept,
    admission,
    certainty,
    commit,
    greedy,
    markov,
    pass_rows,
    penalise,
    window_attention,
)
from sglang_dspark.benchmarks.timing import Candidate, print_rows

# By name: a process that starts new imports them.
OPERATORS: dict[str, Callable[..., Iterator[Candidate]]] = {
    "window_attention": window_attention.candidates,
    "accept": accept.candidates,
    "commit": commit.candidates,
    "markov": markov.candidates,
    "greedy": greedy.candidates,
    "admission": admission.candidates,
    "pass_rows": pass_rows.candidates,
    "penalise": penalise.candidates,
    "certainty": certainty.candidates,
}
# Triton compiles integers of 1 and multiples of 16 separately, so these include every variant.
COMPILED = (1, 16)


def candidates(names: Iterable[str] = tuple(OPERATORS)) -> Iterator[Candidate]:
    """Yield the candidates of these operators in turn."""
    for name in names:
        yield from OPERATORS[name]()


def compile_share(operator: str, part: int, parts: int) -> int:
    """Run every `parts`-th candidate of an operator once, from number `part` on; return the count.

    A candidate that raises is skipped: its row will contain the reason.
    """
    done = 0
    for number, candidate in enumerate(OPERATORS[operator](COMPILED)):
        if number % parts != part:
            continue
        try:
            candidate.make()()
            done += 1
        except Exception:
            continue
    torch.cuda.synchronize()
    return done


if __name__ == "__main__":
    print_rows(candidates)
