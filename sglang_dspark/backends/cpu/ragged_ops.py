"""A ragged verify step's rows on a CPU: which they are, which of them stay, and what they accept.

Stands for the torch forms in sglang/kernels/ops/speculative/dspark/{dspark_verify_window,
dspark_accept}.py, which spread the rows over [R, gamma + 1] windows first: at eight users
that copies 9 MB of logits a step to read an argmax of some rows. Here the rows stay packed; row
`starts[r] + k` is the target's after token k of request r's window.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.backends.cpu.greedy_ops import _argmax as argmax_of
from sglang_dspark.backends.cpu.jit import kernel


@kernel
def _accept(window, lens, starts, bits, accepted, bonus):  # type: ignore[no-untyped-def]
    """window [R, >= lens], lens, starts [R], bits [N, V] -> accepted [R], bonus [R]."""
    for r in range(window.shape[0]):
        first, most = starts[r], lens[r] - 1
        k = 0
        token = argmax_of(bits[first])
        while k < most and token == window[r, k + 1]:
            k += 1
            token = argmax_of(bits[first + k])
        accepted[r], bonus[r] = k, token


def accept_greedy(
    window: Tensor, lens: Tensor, starts: Tensor, logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Longest agreeing prefix of each request's verified drafts, and the target's next token.

    window: [R, n] int64, anchor and drafts; lens: [R] int64 in 1..n, tokens verified; starts: [R]
    int64, each request's first row of logits [N, V] float32, contiguous.
    Returns accepted drafts [R] int32, at most lens - 1, and the bonus token [R] int64.
    """
    accepted = torch.empty(window.shape[0], dtype=torch.int32)
    bonus = torch.empty(window.shape[0], dtype=torch.int64)
    _accept(
        window.numpy(),
        lens.numpy(),
        starts.numpy(),
        logits.view(torch.int32).numpy(),
        accepted.numpy(),
        bonus.numpy(),
    )
    return accepted, bonus


@kernel
def _commit(drafts, accepted, bonus, prefix, commit, lens, tokens):  # type: ignore[no-untyped-def]
    gamma = drafts.shape[1]
    for r in range(drafts.shape[0]):
        commit[r] = accepted[r] + 1
        lens[r] = prefix[r] + commit[r]
        for k in range(gamma):
            tokens[r, k] = drafts[r, k]
        tokens[r, gamma] = 0
        tokens[r, accepted[r]] = bonus[r]


def committed(
    drafts: Tensor, accepted: Tensor, bonus: Tensor, prefix: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What a step commits: tokens each [R] int32, new lengths [R] int64, tokens [R, gamma + 1].

    drafts: [R, gamma] int64; accepted: [R] int32; bonus: [R] int64, put behind the accepted drafts
    (what follows it is not read); prefix: [R] int64, lengths before the step.
    """
    requests, gamma = drafts.shape
    commit = torch.empty(requests, dtype=torch.int32)
    lens = torch.empty(requests, dtype=torch.int64)
    tokens = torch.empty(requests, gamma + 1, dtype=torch.int64)
    _commit(
        drafts.numpy(), accepted.numpy(), bonus.numpy(), prefix.numpy(),
        commit.numpy(), lens.numpy(), tokens.numpy(),
    )  # fmt: skip
    return commit, lens, tokens


@kernel
def _list(starts, lens, out):  # type: ignore[no-untyped-def]
    taken = 0
    for r in range(starts.shape[0]):
        for k in range(lens[r]):
            out[taken] = starts[r] + k
            taken += 1


def rows_of(starts: Tensor, lens: Tensor, total: int) -> Tensor:
    """Row numbers starts[r] .. starts[r] + lens[r] - 1 of all requests, [total] int64.

    starts: [R] int64. lens: [R] integers that add up to `total`.
    """
    out = torch.empty(total, dtype=torch.int64)
    _list(starts.numpy(), lens.numpy(), out.numpy())
    return out


def first_rows(lens: np.ndarray) -> np.ndarray:
    """Where each request's packed rows begin: lens [R] int64 -> [R] int64."""
    return np.cumsum(lens) - lens
