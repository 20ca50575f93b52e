"""Greedy choices over rows of logits: the largest entry, the longest accepted prefix, draft blocks.

`torch.argmax` reads a row one value at a time; here rows are compared as integers in vector
registers, and a verify window is read only up to the row where its drafts end to agree with the
target (accept rule at temperature 0; paper, 2). Ties go to the first entry, as `torch.argmax` does;
which entry is found beside a NaN is not defined.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_dspark.backends.cpu import linear
from sglang_dspark.backends.cpu.jit import kernel, multiply_at
from sglang_dspark.float_ops import bits_of_float

_BLOCK = 2048
_SIGN = np.int32(0x7FFFFFFF)
_MINUS_ZERO = np.int32(-(2**31))


@kernel
def _key(bits):  # type: ignore[no-untyped-def]
    """Order of float32 values as integers; both zeros are equal."""
    if bits == _MINUS_ZERO:
        bits = np.int32(0)
    return bits ^ ((bits >> np.int32(31)) & _SIGN)


@kernel
def _argmax(row):  # type: ignore[no-untyped-def]
    """Index of the largest float32 whose bits are the int32 `row` [V]."""
    best, block = _key(row[0]), 0
    for start in range(0, row.shape[0], _BLOCK):
        part = row[start : start + _BLOCK]
        top = _key(part[0])
        for i in range(part.shape[0]):
            key = _key(part[i])
            top = key if key > top else top
        if top > best:
            best, block = top, start
    for i in range(block, row.shape[0]):
        if _key(row[i]) == best:
            return i
    return 0


@kernel
def _rows(bits, out):  # type: ignore[no-untyped-def]
    """bits [n, V] -> out [n]."""
    for i in range(bits.shape[0]):
        out[i] = _argmax(bits[i])


@kernel
def _likeliest(base, bias):  # type: ignore[no-untyped-def]
    """argmax(base + bias) of a row: base, bias [n]."""
    best, found = _key(bits_of_float(base[0] + bias[0])), 0
    for start in range(0, bias.shape[0], _BLOCK):
        part, more = base[start : start + _BLOCK], bias[start : start + _BLOCK]
        top = _key(bits_of_float(part[0] + more[0]))
        for i in range(more.shape[0]):
            key = _key(bits_of_float(part[i] + more[i]))
            top = key if key > top else top
        if top > best:
            best, found = top, start
    while _key(bits_of_float(base[found] + bias[found])) != best:
        found += 1
    return found


@kernel
def _draft(entry, w2, threads, block, base, anchor, w1, tokens, first, last, out):  # type: ignore[no-untyped-def]
    """Positions first..last-1 of draft blocks; `anchor` [R] stands before the first of them.

    entry: of the matrix kernel for the format of W2, which lies at the address w2.
    """
    requests, n, rank = base.shape[0], base.shape[2], w1.shape[1]
    latent = np.empty((requests, rank), np.float32)
    bias = np.empty((requests, n), np.float32)
    for k in range(first, last):
        for r in range(requests):
            latent[r] = w1[anchor[r] if k == first else out[r, k - 1]]
        multiply_at(
            entry, latent.ctypes.data, rank, requests, block, w2, n, rank,
            bias.ctypes.data, threads,
        )  # fmt: skip
        for r in range(requests):
            out[r, k] = tokens[_likeliest(base[r, k], bias[r])]


def draft_steps(
    base: Tensor,
    anchor: Tensor,
    weights: tuple[NDArray, Tensor, NDArray],
    out: Tensor,
    steps: range,
) -> None:
    """Fill out[:, steps], [R, gamma] int64, with the likeliest tokens of U_k + W1[x_{k-1}] W2^T.

    base [R, gamma, n] contiguous float32; anchor [R] int64, the token before the first of `steps`;
    weights: W1 [V, r] float32, W2 [n, r] in a format of weight_formats.py and token ids [n] int64,
    contiguous. W2 is `linear.eligible` and `linear.kernel_of` has a kernel for it.
    """
    w1, w2, tokens = weights
    kernel = linear.kernel_of(w2)
    assert kernel is not None
    threads = linear.threads_for(*w2.shape)
    _draft(
        kernel.entry, w2.data_ptr(), threads, linear.block_rows(base.shape[0]), base.numpy(),
        anchor.numpy(), w1, tokens, steps.start, steps.stop, out.numpy(),
    )  # fmt: skip


def row_argmax(values: Tensor) -> Tensor:
    """values [n, V] float32, contiguous -> index of each row's first largest entry, [n] int64."""
    out = torch.empty(values.shape[0], dtype=torch.int64)
    _rows(values.view(torch.int32).numpy(), out.numpy())
    return out
