"""Time penalties of a verify pass on a GPU: `python -m sglang_dspark.benchmarks.penalise`.

`penalise` next to its torch reference, which a server without Triton runs. Every request is
penalised, with a repetition penalty as several instruct models ship it. Rows are those of
`timing.timed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from sglang_dspark.benchmarks.timing import Call, Candidate, print_rows
from sglang_dspark.kernels.penalise import penalise_triton

REQUESTS = (1, 8, 64)
VOCAB = 151_936
WIDTHS = (1, 8)  # rows of a window: a step without drafts, and gamma 7


def candidates(
    requests: Sequence[int] = REQUESTS, vocab: int = VOCAB, device: str = "cuda"
) -> Iterator[Candidate]:
    """Yield both implementations for steps of these requests, all of them penalised."""
    for count in requests:
        for width in WIDTHS:
            given = repeated(count, width, vocab, device)
            ways: dict[str, partial[Call]] = {
                "ours": partial(_ours, given),
                "torch": partial(_torch, given),
            }
            for name, make in ways.items():
                # A server launches it behind the pass's graph.
                yield Candidate("penalise", (count, width), "", name, make, eager=True)


def repeated(requests: int, width: int, vocab: int, device: str) -> tuple[Any, ...]:
    """Return arguments of a step in which every request has a repetition penalty of 1.05."""
    places = torch.arange(requests, device=device)
    column = torch.ones(requests, 1, device=device)
    none = torch.zeros(requests, 1, dtype=torch.int64, device=device)
    return (
        torch.randn(requests, width, vocab, device=device),
        places,
        torch.ones(requests, width, dtype=torch.int64, device=device),
        torch.zeros(requests, vocab, dtype=torch.int32, device=device),
        places,
        torch.full((requests,), 100, device=device),
        SimpleNamespace(
            frequency=0 * column,
            presence=0 * column,
            repetition=1.05 * column,
            minimum=none,
            stops=none,
        ),
    )


def _ours(given: tuple[Any, ...]) -> Call:
    return lambda: penalise_triton(*given)


def _torch(given: tuple[Any, ...]) -> Call:
    logits, rows, window, table, slots, outputs, penalties = given
    penalise_windows = import_module("sglang_dspark.verify.penalties").penalise_windows

    def call() -> None:
        penalise_windows(logits, rows, window, table[slots], outputs, penalties)

    return call


if __name__ == "__main__":
    print_rows(candidates)
