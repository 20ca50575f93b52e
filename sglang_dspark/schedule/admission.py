"""Admit the K drafts of largest current survival (paper, 3.2.3).

The order is survival, then position, then request. Only the place orders equal survivals, never a
value that a draft influences. Keys of a row never increase (`ordering.key_of`), so the K best of
the batch are a prefix of every row, and l_r counts those in row r.

Selection replaces sorting: one count of the keys' leading bits finds the bucket of the K-th key,
and two more counts inside that bucket find the key itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_dspark.schedule.budget import Counts, Gains, Workspace
from sglang_dspark.schedule.compiled import compiled
from sglang_dspark.schedule.ordering import INFINITE, key_of


def admit(
    gains: Gains,
    drafts: int,
    workspace: Workspace,
    *,
    limits: Counts | None = None,
    floors: Counts | None = None,
    out: Counts | None = None,
) -> Counts:
    """Return verify lengths of the top-K admission.

    gains: [R, gamma] float32 of the current step, survival (times weight). drafts: K >= 0.
    limits: [R] int64, most drafts of each request (default gamma); floors: [R] int64 <= limits,
    admitted first. Both must be known before this step's drafting. out: [R] int64 to write to.

    Returns l_r, [R] int64: l_r <= limits_r, and sum(l) is K, or sum(limits) if that is smaller.
    Raises ValueError if gains do not fit the workspace or K is negative.
    """
    rows = workspace.check(gains)
    if drafts < 0:
        raise ValueError(f"cannot admit {drafts} drafts")
    lengths = np.empty(rows, np.int64) if out is None else out
    _admit(
        gains.view(np.int32),
        drafts,
        workspace.full[:rows] if limits is None else limits,
        workspace.zero[:rows] if floors is None else floors,
        workspace.keys,
        workspace.other,
        workspace.histogram,
        lengths,
    )
    return lengths


@compiled
def _nth_largest(candidates, count, rank, histogram) -> Any:  # type: ignore[no-untyped-def]
    """Return the rank-th largest of candidates[:count] (from 1), and how many are larger.

    Overwrites candidates. histogram: [3, DIGIT] int64, scratch.
    """
    larger = 0
    for level in range(3):
        shift = 20 - 10 * level
        buckets = 2048 if level == 0 else 1024
        tally = histogram[level]
        tally[:buckets] = 0
        for i in range(count):
            tally[(candidates[i] >> shift) & (buckets - 1)] += 1
        bucket = buckets - 1
        while larger + tally[bucket] < rank:
            larger += tally[bucket]
            bucket -= 1
        kept = 0
        for i in range(count):
            candidate = candidates[i]
            candidates[kept] = candidate
            kept += ((candidate >> shift) & (buckets - 1)) == bucket
        count = kept
    return candidates[0], larger


@compiled
def _admit(  # type: ignore[no-untyped-def]
    bits, drafts, limits, floors, keys, work, histogram, lengths
) -> None:
    rows, gamma = bits.shape
    count = 0
    for r in range(rows):
        above = np.int64(INFINITE)
        for j in range(gamma):
            above = key_of(np.int64(bits[r, j]), above)
            key = above
            if j < floors[r]:
                key = np.int64(INFINITE)
            if j >= limits[r]:
                key = np.int64(-1)  # never admitted, and below every threshold
            else:
                work[count] = key
                count += 1
            keys[r * gamma + j] = key
    if drafts >= count:
        for r in range(rows):
            lengths[r] = limits[r]
        return
    if drafts == 0:
        lengths[:rows] = 0
        return
    threshold, larger = _nth_largest(work, count, drafts, histogram)
    for r in range(rows):
        length = 0
        for j in range(gamma):
            length += keys[r * gamma + j] > threshold
        lengths[r] = length
    _admit_ties(keys, rows, gamma, threshold, drafts - larger, lengths)


@compiled
def _admit_ties(keys, rows, gamma, threshold, left, lengths) -> None:  # type: ignore[no-untyped-def]
    """Admit `left` more drafts whose keys equal the threshold, by position, then request."""
    for j in range(gamma):
        for r in range(rows):
            if keys[r * gamma + j] == threshold:
                lengths[r] += 1
                left -= 1
                if left == 0:
                    return
