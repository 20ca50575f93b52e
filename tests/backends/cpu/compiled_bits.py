"""Print a digest of what Numba kernels compute, to compare compilations.

python -m tests.backends.cpu.compiled_bits prints it, and how many kernels were read from disk; with
an argument, after a function that may reorder sums has called one.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import torch
from numba import njit

from sglang_dspark.backends.cpu import accept

DRAFTS, VOCABULARY = 5, 583
KERNELS = (accept._walk,)


@njit(fastmath=True)
def _free(target, proposal):  # type: ignore[no-untyped-def]
    return accept._residual_mass(target, 1.0, proposal)


def call_from_a_free_kernel() -> None:
    """Make the first call of all: what is compiled for it is what later callers get."""
    _free(*np.ones((2, VOCABULARY), np.float32))


def digest() -> str:
    """Accept drafts by the block rule, whose sums run over the vocabulary."""
    torch.manual_seed(0)
    drafts = torch.randint(0, 50, (2, DRAFTS))
    proposals = torch.randn(2, DRAFTS, VOCABULARY).softmax(-1)
    targets = torch.randn(2, DRAFTS + 1, VOCABULARY).softmax(-1)
    uniforms = torch.rand(2, DRAFTS, dtype=torch.float64)
    found = accept.walk(drafts, proposals, targets, uniforms, torch.tensor([DRAFTS, 3]))
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in found)).hexdigest()[:16]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        call_from_a_free_kernel()
    print(digest(), sum(sum(kernel.stats.cache_hits.values()) for kernel in KERNELS))
