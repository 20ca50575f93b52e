"""Admit drafts on the device in one launch: confidence logits in, ragged windows out.

    c = sigmoid(u x + v)     calibrated confidences, 0 of a logit that is not finite (3.2.1)
    a_j = c_1 ... c_j        survivals, left to right in float32, times the request's weight
    K largest of all a       found by fixing the 31 bits of the K-th one from the top, each by one
                             count; the rest of K goes to equal ones by position, then request
    indptr                   where each request's window of l_r + 1 rows begins in the packed pass

These are the steps of the paper's 3.2.2. Keys, order and lengths are bitwise those of
`sglang_dspark.schedule` on the host. Confidences are computed in float64 and rounded to float32 as
there; the two exponentials may differ in their last of 53 bits.

The host knows K before anything is drafted, and all of `terms`: one upload a step.
One program has all keys in registers: a step has at most [16, 1024].

`admit_torch` is the reference: a stable sort in that order.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

INFINITE = 0x7F800000  # bit pattern of +inf: the key of drafts within the floor
NEVER = -1  # key of drafts past the limit
LOGIT_LIMIT = 15.0  # as on the host (`schedule/online.py`)
_FEW_KEYS = 4096  # as many as 8 warps hold


def terms_of(
    slopes: NDArray[np.float64],
    shifts: NDArray[np.float64],
    limits: NDArray[np.int64],
    weights: NDArray[np.float32] | None = None,
    floors: NDArray[np.int64] | None = None,
) -> Tensor:
    """Pack the host's inputs of a step before it is drafted: [R, 2 gamma + 3] float64, on the host.

    slopes u, shifts v: [R, gamma]. limits, floors: [R], floors <= limits <= gamma. weights: [R]
    >= 0. Without weights every weight is 1, without floors every floor 0. A row is u, v, weight,
    limit, floor.
    """
    rows, gamma = slopes.shape
    terms = np.empty((rows, 2 * gamma + 3))
    terms[:, :gamma] = slopes
    terms[:, gamma : 2 * gamma] = shifts
    terms[:, -3] = 1.0 if weights is None else weights
    terms[:, -2] = limits
    terms[:, -1] = 0.0 if floors is None else floors
    return torch.from_numpy(terms)


def admit_triton(logits: Tensor, terms: Tensor, drafts: int) -> Tensor:
    """Return window starts in the pass, [R + 1] int32, for the K drafts of largest survival.

    logits: [R, gamma] of the confidence head, any floating type, rows of any stride. terms: of
    `terms_of`, on the same device. drafts: K >= 0. Request r verifies indptr[r + 1] - indptr[r]
    rows, its anchor and l_r drafts; sum(l) is K or, if that is smaller, sum(limits).
    Raises ValueError on shapes or types that do not fit; values are not checked.
    """
    _check(logits, terms, drafts)
    rows, gamma = logits.shape
    indptr = torch.empty(rows + 1, dtype=torch.int32, device=logits.device)
    row_block, gamma_block = (triton.next_power_of_2(size) for size in (rows, gamma))
    _admit_kernel[(1,)](
        logits,
        terms,
        indptr,
        drafts,
        rows,
        gamma,
        logits.stride(0),
        row_block=row_block,
        gamma_block=gamma_block,
        num_warps=8 if row_block * gamma_block <= _FEW_KEYS else 16,
        enable_fp_fusion=False,  # u x + v is rounded twice, as on the host
    )
    return indptr


def admit_torch(logits: Tensor, terms: Tensor, drafts: int) -> Tensor:
    """Compute the reference of `admit_triton`: same arguments, same result, on any device."""
    _check(logits, terms, drafts)
    keys = keys_torch(logits, terms)  # [gamma, R]
    rows = keys.shape[1]
    order = torch.argsort(keys.flatten(), descending=True, stable=True)  # position, then request
    places = torch.arange(len(order), device=keys.device)
    taken = places < (keys >= 0).sum().clamp(max=drafts)
    ends = torch.ones(rows, dtype=torch.int32, device=keys.device)  # the anchors
    ends = ends.index_add_(0, order % rows, taken.int()).cumsum(0, dtype=torch.int32)
    return torch.nn.functional.pad(ends, (1, 0))


def keys_torch(logits: Tensor, terms: Tensor) -> Tensor:
    """Return integer keys of all drafts, [gamma, R] int32; non-increasing along gamma."""
    rows, gamma = logits.shape
    x = logits.double().clamp(-LOGIT_LIMIT, LOGIT_LIMIT)
    z = terms[:, :gamma] * x + terms[:, gamma : 2 * gamma]
    confidence = torch.where(logits.isfinite(), 1.0 / (1.0 + torch.exp(-z)), 0.0).float()
    weights, limits, floors = terms[:, -3].float(), terms[:, -2], terms[:, -1]
    running = torch.ones_like(weights)
    above = torch.full((rows,), INFINITE, dtype=torch.int32, device=logits.device)
    keys = []
    for j in range(gamma):
        running = running * confidence[:, j]
        bits = (running * weights).view(torch.int32)
        bits = torch.where((bits < 0) | (bits > INFINITE), 0, bits)
        above = torch.minimum(bits, above)
        key = torch.where(j < floors, INFINITE, above)
        keys.append(torch.where(j >= limits, NEVER, key))
    return torch.stack(keys).int()


def _check(logits: Tensor, terms: Tensor, drafts: int) -> None:
    if logits.dim() != 2 or logits.numel() == 0 or not logits.dtype.is_floating_point:
        raise ValueError(f"logits must be [R, gamma], floating: {tuple(logits.shape)}")
    if logits.stride(1) != 1:
        raise ValueError("a row of logits must be contiguous")
    wanted = (logits.shape[0], 2 * logits.shape[1] + 3)
    if terms.shape != wanted or terms.dtype != torch.float64 or not terms.is_contiguous():
        raise ValueError(
            f"terms must be {wanted} float64, contiguous: {tuple(terms.shape)} {terms.dtype}"
        )
    if drafts < 0:
        raise ValueError(f"drafts must be 0 or more: {drafts}")


@triton.jit(do_not_specialize=["drafts", "rows"])  # type: ignore[untyped-decorator]
def _admit_kernel(  # type: ignore[no-untyped-def]
    logits,  # [R, gamma]
    terms,  # [R, 2 gamma + 3] float64
    indptr,  # [R + 1] int32, written
    drafts,
    rows,
    gamma,
    row_stride,
    row_block: tl.constexpr,
    gamma_block: tl.constexpr,
):
    r = tl.arange(0, row_block)
    keys = _keys(logits, terms, rows, gamma, row_stride, row_block, gamma_block)
    possible = tl.sum((keys >= 0).to(tl.int32))
    wanted = tl.minimum(drafts, possible).to(tl.int32)
    threshold = wanted * 0
    for step in range(31):
        trial = threshold | (1 << (30 - step))
        count = tl.sum((keys >= trial).to(tl.int32))
        threshold = tl.where(count >= wanted, trial, threshold)
    larger = keys > threshold
    equal = (keys == threshold).to(tl.int32)
    left = wanted - tl.sum(larger.to(tl.int32))
    in_position = tl.sum(equal, axis=1)  # [gamma_block]
    before = tl.cumsum(in_position, axis=0) - in_position
    rank = before[:, None] + tl.cumsum(equal, axis=1)  # from 1, by position, then request
    taken = larger | ((equal > 0) & (rank <= left))
    window = 1 + tl.sum(taken.to(tl.int32), axis=0)  # [row_block], the anchor included
    tl.store(indptr, 0)
    tl.store(indptr + 1 + r, tl.cumsum(window, axis=0), mask=r < rows)


@triton.jit  # type: ignore[untyped-decorator]
def _keys(  # type: ignore[no-untyped-def]
    logits, terms, rows, gamma, row_stride, row_block: tl.constexpr, gamma_block: tl.constexpr
):  # fmt: skip
    """Compute `keys_torch`, [gamma_block, row_block]; NEVER where there is no draft."""
    r = tl.arange(0, row_block)
    position = tl.arange(0, gamma_block)
    inside = r < rows
    own = terms + r * (2 * gamma + 3)
    weight = tl.load(own + 2 * gamma, mask=inside, other=0.0).to(tl.float32)
    limit = tl.load(own + 2 * gamma + 1, mask=inside, other=0.0).to(tl.int32)
    floor = tl.load(own + 2 * gamma + 2, mask=inside, other=0.0).to(tl.int32)
    running = tl.full([row_block], 1.0, tl.float32)
    above = tl.full([row_block], 0x7F800000, tl.int32)
    keys = tl.full([gamma_block, row_block], -1, tl.int32)
    for j in range(gamma):
        x = tl.load(logits + r * row_stride + j, mask=inside, other=0.0).to(tl.float64)
        slope = tl.load(own + j, mask=inside, other=0.0)
        shift = tl.load(own + gamma + j, mask=inside, other=0.0)
        bounded = tl.minimum(tl.maximum(x, -15.0), 15.0)
        confidence = 1.0 / (1.0 + tl.exp(-(slope * bounded + shift)))
        running = running * tl.where(x - x == 0.0, confidence, 0.0).to(tl.float32)
        bits = (running * weight).to(tl.int32, bitcast=True)
        bits = tl.where((bits < 0) | (bits > 0x7F800000), 0, bits)
        above = tl.minimum(bits, above)
        key = tl.where(j < floor, 0x7F800000, above)
        key = tl.where((j < limit) & inside, key, -1)
        keys = tl.where(position[:, None] == j, key[None, :], keys)
    return keys
