"""Accept greedily over rows of logits: argmax, ragged windows, and drafted chains (Numba).

`torch.argmax` reads a row one value at a time; here rows are compared as integers in vector
registers. A verify window is read only up to the first row that disagrees with its draft (accept
rule at temperature 0; paper, 2). Ties go to the first entry, as in `torch.argmax`; for a row with
NaN the result is undefined.

`accept_greedy` and `committed` replace the torch forms in
sglang/kernels/ops/speculative/dspark/dspark_accept.py, which spread the rows over [R, gamma + 1]
windows first: at eight requests that copies 9 MB of logits a step. Here the rows stay packed; row
`starts[r] + k` is the target's after token k of request r's window.

`verify_chains` replaces the greedy branch of `eagle_sample` and `verify_tree_greedy`
(sglang/srt/speculative/eagle_utils.py, sglang/kernels/ops/speculative/spec_tree.py) where every
tree is a chain (EAGLE with topk 1, as in MTP-1): an argmax over all logits and some thirty small
torch calls.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.backends.cpu.jit import kernel

ARGMAX_BLOCK = 2048
_SIGN = np.int32(0x7FFFFFFF)
_MINUS_ZERO = np.int32(-(2**31))


@kernel
def order_key(bits):  # type: ignore[no-untyped-def]
    """Map the bits of a float32 to an integer of the same order; both zeros are equal."""
    if bits == _MINUS_ZERO:
        bits = np.int32(0)
    return bits ^ ((bits >> np.int32(31)) & _SIGN)


@kernel
def argmax_of(row):  # type: ignore[no-untyped-def]
    """Return the index of the largest float32 whose bits are the int32 `row` [V]."""
    best, block = order_key(row[0]), 0
    for start in range(0, row.shape[0], ARGMAX_BLOCK):
        part = row[start : start + ARGMAX_BLOCK]
        top = order_key(part[0])
        for i in range(part.shape[0]):
            key = order_key(part[i])
            top = key if key > top else top
        if top > best:
            best, block = top, start
    for i in range(block, row.shape[0]):
        if order_key(row[i]) == best:
            return i
    return 0


@kernel
def _rows(bits, out):  # type: ignore[no-untyped-def]
    """bits [n, V] -> out [n]."""
    for i in range(bits.shape[0]):
        out[i] = argmax_of(bits[i])


def row_argmax(values: Tensor) -> Tensor:
    """Return each row's first largest entry: values [n, V] float32, contiguous -> [n] int64."""
    out = torch.empty(values.shape[0], dtype=torch.int64)
    _rows(values.view(torch.int32).numpy(), out.numpy())
    return out


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
    """Accept the longest agreeing prefix of each request's drafts; add the target's next token.

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
    """Return what a step commits: counts [R] int32, lengths [R] int64, tokens [R, gamma + 1].

    drafts: [R, gamma] int64; accepted: [R] int32; bonus: [R] int64, placed behind the accepted
    drafts (later entries are not read); prefix: [R] int64, lengths before the step.
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
def _verify(window, bits, predicted, index, lens):  # type: ignore[no-untyped-def]
    """window [R, n], bits [R * n, V] -> predicted [R * n], index [R, n], lens [R]."""
    n = window.shape[1]
    for r in range(window.shape[0]):
        for k in range(n):
            predicted[r * n + k], index[r, k] = 0, -1
        k = 0
        while True:
            token = argmax_of(bits[r * n + k])
            predicted[r * n + k], index[r, k] = token, r * n + k
            if k + 1 == n or token != window[r, k + 1]:
                break
            k += 1
        lens[r] = k + 1


def verify_chains(window: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Verify each request's chain up to the first token that differs from the draft.

    window: [R, n] int64, root and drafts. logits: [R * n, V] float32, contiguous, row r * n + k
    being the target's after window[r, k].
    Returns the most likely token of each row read, 0 in the others, [R * n] int32; the rows read,
    -1 behind them, [R, n] int32; tokens a request gains, the bonus token included, [R] int32.
    """
    requests, n = window.shape
    predicted = torch.empty(requests * n, dtype=torch.int32)
    index = torch.empty(requests, n, dtype=torch.int32)
    lens = torch.empty(requests, dtype=torch.int32)
    bits = logits.view(torch.int32).numpy()
    _verify(window.numpy(), bits, predicted.numpy(), index.numpy(), lens.numpy())
    return predicted, index, lens
