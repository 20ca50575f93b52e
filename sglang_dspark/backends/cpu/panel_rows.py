"""A few rows of an int8 weight as float32 numbers (Numba): the embeddings of a step.

The layout is that of weight_formats.py. torch needs a dozen calls for it, which cost more than the
rows: some 50 us of a step with warm caches, several times that between two passes.
"""

from __future__ import annotations

import numpy as np
from numba import carray
from numpy.typing import NDArray

from sglang_dspark.backends.cpu.jit import bytes_at, floats_at, kernel

# Beyond so many rows torch's own loops are as fast.
MOST_ROWS = 256


@kernel
def panel_rows(address, total, layout, flip, rows, out):  # type: ignore[no-untyped-def]
    """out[i] = row rows[i] of `total`. Whether all of them exist; else nothing is written.

    address: of the first panel. layout: rows of a panel, columns of a group, columns side by side,
    bytes of a panel's group. flip: of a byte, to stand 128 above its number. rows [n] int64, out
    [n, K] float32.
    """
    for i in range(rows.shape[0]):
        if rows[i] < 0 or rows[i] >= total:
            return False
    lanes, columns, together, step = layout
    groups = out.shape[1] // columns
    size = total // lanes * groups * step
    found, scales = carray(bytes_at(address), (size,)), carray(floats_at(address), (size // 4,))
    for i in range(rows.shape[0]):
        panel, lane = rows[i] // lanes, rows[i] % lanes
        for g in range(groups):
            first = (panel * groups + g) * step
            scale = scales[first // 4 + lane]
            first += 4 * lanes + lane * together
            for c in range(columns):
                byte = found[first + c // together * lanes * together + c % together]
                out[i, g * columns + c] = np.float32(np.int32(byte ^ flip) - 128) * scale
    return True


def float_rows(
    address: int,
    total: int,
    layout: tuple[int, int, int, int],
    signed: bool,
    rows: NDArray[np.int64],
    out: NDArray[np.float32],
) -> None:
    """`panel_rows`, of bytes with a sign or of those that lie 128 above what they stand for.

    Raises IndexError for a row that is not there.
    """
    if not panel_rows(address, total, layout, np.uint8(128 if signed else 0), rows, out):
        raise IndexError(f"rows {rows.min()} to {rows.max()} of a weight with {total} rows")
