"""Time estimated confidence on a GPU: `python -m sglang_dspark.benchmarks.certainty`.

`certainty` next to its torch reference, which a server without Triton runs. Rows are those of
`timing.timed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from sglang_dspark.benchmarks.timing import Call, Candidate, print_rows
from sglang_dspark.kernels.certainty import certainty_triton

REQUESTS = (1, 8, 64)
GAMMA, VOCAB = 7, 151_936


def candidates(
    requests: Sequence[int] = REQUESTS, vocab: int = VOCAB, device: str = "cuda"
) -> Iterator[Candidate]:
    """Yield both implementations for the drafts of these requests."""
    for count in requests:
        logits = torch.randn(count, GAMMA, vocab, device=device, dtype=torch.bfloat16)
        temperature = torch.ones(count, device=device)
        ways: dict[str, partial[Call]] = {
            "ours": partial(_ours, logits, temperature),
            "torch": partial(_torch, logits, temperature),
        }
        for name, make in ways.items():
            # A server launches it behind the draft's graph.
            yield Candidate("certainty", (count, GAMMA), "", name, make, eager=True)


def _ours(logits: Tensor, temperature: Tensor) -> Call:
    return lambda: certainty_triton(logits, temperature)


def _torch(logits: Tensor, temperature: Tensor) -> Call:
    reference = import_module("sglang_dspark.drafter.draft_confidence").draft_confidence
    return lambda: reference(logits, temperature)


if __name__ == "__main__":
    print_rows(candidates)
