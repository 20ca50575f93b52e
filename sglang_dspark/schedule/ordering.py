"""Map gains of drafts to integers of the same order, and radix-sort those (compiled).

A gain is the expected value of admitting a draft: its survival a_{r,j}, times the request's weight
if there is one. Non-negative float32 bit patterns order like the numbers. So 31 bits, as digits of
10, 10 and 11, sort any such numbers in three passes without comparisons.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from sglang_dspark.schedule.compiled import compiled

DIGIT = 2048  # buckets of the widest digit
INFINITE = 0x7F800000  # bit pattern of +inf
POSITION_BITS = 8  # a sort key is (gain bits << 8) | position, so gamma <= 255


@intrinsic
def _float_of(typingctx, bits):  # type: ignore[no-untyped-def]
    """Return the float32 whose bit pattern is the int32 `bits`."""

    def codegen(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), codegen


@compiled
def gain_of(key):  # type: ignore[no-untyped-def]
    """Return the gain in a sort key, as float64."""
    return np.float64(_float_of(np.int32(key >> POSITION_BITS)))


@compiled
def key_of(bits, above):  # type: ignore[no-untyped-def]
    """Return the key of a gain, from its float32 bit pattern and the key of the draft before it.

    The key never exceeds `above`: for any input the keys of a row do not increase, so every
    admitted set is prefix-closed. Negative numbers (also -0) and NaN count as 0.
    """
    if bits < 0 or bits > INFINITE:
        return 0
    return min(bits, above)


@compiled
def gather_keys(bits, limits, floors, keys) -> Any:  # type: ignore[no-untyped-def]
    """Collect the candidates' sort keys; return (candidates, forced drafts, their gain, depth).

    bits: [R, gamma] int32 view of gains. limits, floors: [R] int64, floors <= limits <= gamma.
    Drafts within the floor are forced, not candidates; depth is the largest floor. keys: [>= R
    gamma] int64, filled.
    """
    rows = bits.shape[0]
    count, forced, deepest = 0, 0, 0
    forced_gain = 0.0
    for r in range(rows):
        above = np.int64(INFINITE)
        deepest = max(deepest, floors[r])
        for j in range(limits[r]):
            above = key_of(np.int64(bits[r, j]), above)
            key = (above << POSITION_BITS) | j
            if j < floors[r]:
                forced += 1
                forced_gain += gain_of(key)
            else:
                keys[count] = key
                count += 1
    return count, forced, forced_gain, deepest


@compiled
def sort_descending(keys, other, count, histogram):  # type: ignore[no-untyped-def]
    """Sort keys[:count] by gain, largest first, in place.

    other: as long as keys, scratch. histogram: [3, DIGIT] int64, scratch. A digit that is equal in
    all keys needs no pass.
    """
    histogram[:] = 0
    for i in range(count):
        bits = keys[i] >> POSITION_BITS
        histogram[0, bits & 1023] += 1
        histogram[1, (bits >> 10) & 1023] += 1
        histogram[2, bits >> 20] += 1
    source, target = keys, other
    swapped = False
    for digit in range(3):
        shift = POSITION_BITS + 10 * digit
        mask = 2047 if digit == 2 else 1023
        if histogram[digit, (source[0] >> shift) & mask] == count:
            continue
        before = 0
        for bucket in range(mask, -1, -1):
            size = histogram[digit, bucket]
            histogram[digit, bucket] = before
            before += size
        for i in range(count):
            bucket = (source[i] >> shift) & mask
            target[histogram[digit, bucket]] = source[i]
            histogram[digit, bucket] += 1
        source, target = target, source
        swapped = not swapped
    if swapped:
        keys[:count] = other[:count]
