"""Greedy choices over rows of logits: the largest entry, and the longest accepted prefix.

`torch.argmax` reads a row one value at a time; here rows are compared as integers in vector
registers, and a verify window is read only up to the row where its drafts end to agree with the
target (accept rule at temperature 0; paper, 2). Ties go to the first entry, as `torch.argmax` does;
which entry is found beside a NaN is not defined.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.serving.cpu.jit import bits_of_float, exact_kernel

_BLOCK = 2048
_SIGN = np.int32(0x7FFFFFFF)
_MINUS_ZERO = np.int32(-(2**31))


@exact_kernel
def _key(bits):  # type: ignore[no-untyped-def]
    """Order of float32 values as integers; both zeros are equal."""
    if bits == _MINUS_ZERO:
        bits = np.int32(0)
    return bits ^ ((bits >> np.int32(31)) & _SIGN)


@exact_kernel
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


@exact_kernel
def _rows(bits, out):  # type: ignore[no-untyped-def]
    """bits [n, V] -> out [n]."""
    for i in range(bits.shape[0]):
        out[i] = _argmax(bits[i])


@exact_kernel
def _accept(window, bits, accepted, bonus):  # type: ignore[no-untyped-def]
    """window [R, n] anchor and drafts, bits [R * n, V] -> accepted [R], bonus [R]."""
    n = window.shape[1]
    for r in range(window.shape[0]):
        k = 0
        token = _argmax(bits[r * n])
        while k + 1 < n and token == window[r, k + 1]:
            k += 1
            token = _argmax(bits[r * n + k])
        accepted[r], bonus[r] = k, token


@exact_kernel
def _likeliest(base, bias, tokens, out):  # type: ignore[no-untyped-def]
    """tokens[argmax(base + bias)] of each row: base, bias [R, n], tokens [n] -> out [R]."""
    for r in range(base.shape[0]):
        above, added = base[r], bias[r]
        best, found = _key(bits_of_float(above[0] + added[0])), 0
        for start in range(0, added.shape[0], _BLOCK):
            part, more = above[start : start + _BLOCK], added[start : start + _BLOCK]
            top = _key(bits_of_float(part[0] + more[0]))
            for i in range(more.shape[0]):
                key = _key(bits_of_float(part[i] + more[i]))
                top = key if key > top else top
            if top > best:
                best, found = top, start
        while _key(bits_of_float(above[found] + added[found])) != best:
            found += 1
        out[r] = tokens[found]


def likeliest(base: Tensor, bias: Tensor, tokens: Tensor) -> Tensor:
    """Token of the largest base + bias: base, bias [R, n] float32, tokens [n] ids -> [R] int64.

    base may be a slice of a block [R, gamma, n]; bias is contiguous.
    """
    out = torch.empty(base.shape[0], dtype=torch.int64)
    _likeliest(base.numpy(), bias.numpy(), tokens.numpy(), out.numpy())
    return out


def row_argmax(values: Tensor) -> Tensor:
    """values [n, V] float32, contiguous -> index of each row's first largest entry, [n] int64."""
    out = torch.empty(values.shape[0], dtype=torch.int64)
    _rows(values.view(torch.int32).numpy(), out.numpy())
    return out


def accept_window(window: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Longest prefix of drafts that the target's most likely tokens agree with.

    window: [R, n] int64, anchor and drafts. logits: [R * n, V] float32, contiguous, row k of a
    request being the target's after window[:, k]. Returns accepted drafts [R] int32 and the
    target's token after them [R] int64.
    """
    accepted = torch.empty(window.shape[0], dtype=torch.int32)
    bonus = torch.empty(window.shape[0], dtype=torch.int64)
    _accept(window.numpy(), logits.view(torch.int32).numpy(), accepted.numpy(), bonus.numpy())
    return accepted, bonus
