"""Map the programs of a grouped GEMM to tiles of ragged groups, inside the kernel.

Every program reads all group sizes (E is a few hundred) and computes the same cut; no earlier
launch and no host value is needed. Rows that belong to no expert form one
more group, which is not multiplied and becomes zero.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bounds(offsets, group, size, experts):
    """Return the first row of a group, the row after its last, and the next group's first row: rows
    from the second to the third become zero. Groups past the last one have no rows. int32."""
    real = group < experts
    first = tl.load(offsets + group, mask=group <= experts, other=size)
    end = tl.load(offsets + group + 1, mask=real, other=0)
    end = tl.where(real, end, first)
    return first, end, tl.where(real, end, size)


@triton.jit
def tiles_of_groups(offsets, size, experts, groups_block: tl.constexpr, block_m: tl.constexpr):
    """Return the running count of tiles including each group, tiles of each group, tiles of all."""
    first, _, limit = bounds(offsets, tl.arange(0, groups_block), size, experts)
    needed = (limit - first + block_m - 1) // block_m
    return tl.cumsum(needed, 0), needed, tl.sum(needed, 0)


@triton.jit
def tile_place(tile, total, column_tiles, row_tiles: tl.constexpr):
    """Return row tile and column tile of a tile number. `row_tiles` tiles of rows run through all
    columns together, one below the other: neighbours in time read the same weights."""
    band = tile // (row_tiles * column_tiles) * row_tiles
    height = tl.minimum(total - band, row_tiles)
    inside = tile - band * column_tiles
    return band + inside % height, inside // height


@triton.jit
def group_of_tile(row_tile, last, needed):
    """Return the group of a row tile, and the number of tiles of the groups before it."""
    passed = last <= row_tile
    return tl.sum(passed.to(tl.int32), 0), tl.sum(tl.where(passed, needed, 0), 0)
