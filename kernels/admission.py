"""Survival and top-K admission on the device, K included: no value travels to the host.

Two launches. The first multiplies each request's confidences left to right in float32 and turns
survivals into integer keys that never increase along a request (the paper's 3.2.2, and what
`sglang_dspark.schedule` does on the host: same keys, same order, same lengths, bit for bit). The
second finds the K-th largest key by fixing its 31 bits from the top, each by one count over all
keys, and hands out what is left to the keys that equal it, by position, then request.

`admit_torch` is the reference: a stable sort in that order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

INFINITE = 0x7F800000  # bit pattern of +inf: the key of drafts within the floor
NEVER = -1  # key of drafts behind the limit
_ROWS = 128  # requests a program of the first launch


def admit_triton(
    confidence: Tensor,
    drafts: Tensor,
    weights: Tensor | None = None,
    limits: Tensor | None = None,
    floors: Tensor | None = None,
) -> Tensor:
    """Verify lengths l_r [R] int32 of the K drafts of largest survival.

    confidence: [R, gamma] float32 in [0, 1], contiguous. drafts: [1] int64 on the device, K >= 0,
    fixed before drafting. weights: [R] float32 >= 0. limits, floors: [R] int32, floors <= limits
    <= gamma. sum(l) is K or, if that is smaller, sum(limits).
    Raises ValueError on shapes or types that do not fit; values are not looked at.
    """
    _check(confidence, drafts, weights, limits, floors)
    rows, gamma = confidence.shape
    keys = _keys_triton(confidence, weights, limits, floors)
    lengths = torch.empty(rows, dtype=torch.int32, device=confidence.device)
    _select_kernel[(1,)](
        keys,
        drafts,
        lengths,
        rows,
        gamma,
        row_block=triton.next_power_of_2(rows),
        gamma_block=triton.next_power_of_2(gamma),
        num_warps=8,
    )
    return lengths


def _keys_triton(
    confidence: Tensor, weights: Tensor | None, limits: Tensor | None, floors: Tensor | None
) -> Tensor:
    """`keys_torch` in one launch."""
    rows, gamma = confidence.shape
    keys = torch.empty(gamma, rows, dtype=torch.int32, device=confidence.device)
    _keys_kernel[(triton.cdiv(rows, _ROWS),)](
        confidence,
        confidence if weights is None else weights,
        keys if limits is None else limits,
        keys if floors is None else floors,
        keys,
        rows,
        gamma,
        weighted=weights is not None,
        limited=limits is not None,
        floored=floors is not None,
        block=_ROWS,
    )
    return keys


def admit_torch(
    confidence: Tensor,
    drafts: Tensor,
    weights: Tensor | None = None,
    limits: Tensor | None = None,
    floors: Tensor | None = None,
) -> Tensor:
    """The reference of `admit_triton`; same arguments, same result, on any device."""
    _check(confidence, drafts, weights, limits, floors)
    keys = keys_torch(confidence, weights, limits, floors)  # [gamma, R]
    order = torch.argsort(keys.flatten(), descending=True, stable=True)  # position, then request
    taken = torch.arange(len(order), device=keys.device) < torch.minimum(drafts, (keys >= 0).sum())
    lengths = torch.zeros(keys.shape[1], dtype=torch.int32, device=keys.device)
    return lengths.index_add_(0, order % keys.shape[1], taken.int())


def keys_torch(
    confidence: Tensor, weights: Tensor | None, limits: Tensor | None, floors: Tensor | None
) -> Tensor:
    """Integer keys of all drafts, [gamma, R] int32; non-increasing along gamma up to floors."""
    rows, gamma = confidence.shape
    running = torch.ones_like(confidence[:, 0])
    above = torch.full((rows,), INFINITE, dtype=torch.int32, device=confidence.device)
    keys = []
    for j in range(gamma):
        running = running * confidence[:, j]
        gain = running if weights is None else running * weights
        bits = gain.view(torch.int32)
        bits = torch.where((bits < 0) | (bits > INFINITE), 0, bits)
        above = torch.minimum(bits, above)
        key = above if floors is None else torch.where(j < floors, INFINITE, above)
        keys.append(key if limits is None else torch.where(j >= limits, NEVER, key))
    return torch.stack(keys).int()


def _check(
    confidence: Tensor,
    drafts: Tensor,
    weights: Tensor | None,
    limits: Tensor | None,
    floors: Tensor | None,
) -> None:
    if confidence.dim() != 2 or confidence.numel() == 0 or confidence.dtype != torch.float32:
        raise ValueError(f"confidence must be [R, gamma] float32: {tuple(confidence.shape)}")
    if not confidence.is_contiguous():
        raise ValueError("confidence must be contiguous")
    if drafts.shape != (1,) or drafts.dtype != torch.int64:
        raise ValueError(f"drafts must be [1] int64: {tuple(drafts.shape)} {drafts.dtype}")
    rows = (len(confidence),)
    wanted = (("weights", weights, torch.float32), ("limits", limits, torch.int32))
    for name, given, dtype in (*wanted, ("floors", floors, torch.int32)):
        if given is not None and (given.shape != rows or given.dtype != dtype):
            raise ValueError(f"{name} must be [R] {dtype}: {tuple(given.shape)} {given.dtype}")


@triton.jit  # type: ignore[untyped-decorator]
def _keys_kernel(  # type: ignore[no-untyped-def]
    confidence,  # [R, gamma] float32
    weights,  # [R] float32
    limits,  # [R] int32
    floors,  # [R] int32
    keys,  # [gamma, R] int32, written
    rows,
    gamma,
    weighted: tl.constexpr,
    limited: tl.constexpr,
    floored: tl.constexpr,
    block: tl.constexpr,
):
    r = tl.program_id(0) * block + tl.arange(0, block)
    inside = r < rows
    running = tl.full([block], 1.0, tl.float32)
    above = tl.full([block], 0x7F800000, tl.int32)
    for j in range(gamma):
        running = running * tl.load(confidence + r * gamma + j, mask=inside, other=0.0)
        gain = running
        if weighted:
            gain = running * tl.load(weights + r, mask=inside, other=0.0)
        bits = gain.to(tl.int32, bitcast=True)
        bits = tl.where((bits < 0) | (bits > 0x7F800000), 0, bits)
        above = tl.minimum(bits, above)
        key = above
        if floored:
            key = tl.where(j < tl.load(floors + r, mask=inside, other=0), 0x7F800000, key)
        if limited:
            key = tl.where(j >= tl.load(limits + r, mask=inside, other=0), -1, key)
        tl.store(keys + j * rows + r, key, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _select_kernel(  # type: ignore[no-untyped-def]
    keys,  # [gamma, R] int32
    drafts,  # [1] int64
    lengths,  # [R] int32, written
    rows,
    gamma,
    row_block: tl.constexpr,
    gamma_block: tl.constexpr,
):
    j = tl.arange(0, gamma_block)
    r = tl.arange(0, row_block)
    inside = (j[:, None] < gamma) & (r[None, :] < rows)
    key = tl.load(
        keys + j[:, None] * rows + r[None, :], mask=inside, other=-1
    )  # [gamma_block, row_block]
    possible = tl.sum(tl.sum((key >= 0).to(tl.int32), axis=1), axis=0)
    wanted = tl.minimum(tl.load(drafts), possible.to(tl.int64)).to(tl.int32)
    threshold = wanted * 0
    for step in range(31):
        trial = threshold | (1 << (30 - step))
        count = tl.sum(tl.sum((key >= trial).to(tl.int32), axis=1), axis=0)
        threshold = tl.where(count >= wanted, trial, threshold)
    larger = key > threshold
    equal = (key == threshold).to(tl.int32)
    left = wanted - tl.sum(tl.sum(larger.to(tl.int32), axis=1), axis=0)
    in_position = tl.sum(equal, axis=1)  # [gamma_block]
    before = tl.cumsum(in_position, axis=0) - in_position
    rank = before[:, None] + tl.cumsum(equal, axis=1)  # from 1, by position, then request
    taken = larger | ((equal > 0) & (rank <= left))
    length = tl.sum(taken.to(tl.int32), axis=0)  # [row_block]
    tl.store(lengths + r, length, mask=r < rows)
