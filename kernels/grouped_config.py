"""Choose tile shapes and launch parameters of the grouped GEMMs, by rows of a group and format.

Two regimes. Decoding has few rows a group and reads weights: tiles of 64 columns (more tiles than
processors from a handful of experts on), as many rows as needed, several programs a processor to
keep loads in flight. Prefill has many rows and computes: 128 x 128, two warp groups, one program.
Chosen by shared memory and registers as compiled for sm_90; not yet tuned by measurement.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import triton

from sglang_dspark.kernels.grouped_layout import FP4_GROUPS, SCALE_BLOCK


@dataclass(frozen=True)
class Tiling:
    """Rows, columns and depth of a tile's step, tiles of rows in a band, warps, pipeline stages,
    programs a processor, and most registers of a thread (None: as many as the kernel needs)."""

    block_m: int
    block_n: int
    block_k: int
    row_tiles: int
    num_warps: int
    num_stages: int
    programs: int
    maxnreg: int | None = None

    def as_options(self) -> dict[str, int]:
        """Return the options by keyword of the kernel."""
        options = {name: value for name, value in asdict(self).items() if value is not None}
        del options["programs"]
        return options


def tiling(group: int, form: str, x_scaled: bool, swiglu: bool, fp8_out: bool) -> Tiling:
    """Choose for groups of about `group` rows: weights of a format, FP8 rows in, SwiGLU, FP8 out.

    A step is 128 deep, one group of FP8 scales; BF16 has none and uses half of that where tiles
    are large. FP4 with few BF16 rows uses 256, so that each thread has 4 bytes of scales: fewer
    cannot be copied ahead of time. With 16 rows, registers are limited to those of three programs.
    FP8 rows out need all 128 columns of a scale in one tile. SwiGLU has two accumulators and scaled
    formats a partial sum next to each: 128 rows of those would spill registers.
    """
    block_m = min(128, max(16, triton.next_power_of_2(max(group, 1))))
    if block_m <= 32:
        columns, warps = (SCALE_BLOCK, 8) if fp8_out else (64, 4)
        # Four stages of a scale's 128 columns are more than the 99 KiB of an L4 or a 4090.
        stages, programs = 3 if form == "bf16" or fp8_out else 4, 8 // warps
        if form in FP4_GROUPS and not x_scaled:
            three = block_m == 16 and warps == 4
            programs, registers = (3, 65536 // (3 * 128) // 8 * 8) if three else (programs, None)
            return Tiling(block_m, columns, 2 * SCALE_BLOCK, 8, warps, 3, programs, registers)
        return Tiling(block_m, columns, SCALE_BLOCK, 8, warps, stages, programs)
    if form == "bf16":
        return Tiling(block_m, SCALE_BLOCK, SCALE_BLOCK // 2, 8, 8, 3, 1)
    rows = min(block_m, 64) if swiglu or not x_scaled else block_m
    return Tiling(rows, SCALE_BLOCK, SCALE_BLOCK, 8, 8, 3 if x_scaled else 2, 1)
