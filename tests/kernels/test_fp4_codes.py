"""FP4 codes and scales as numbers: the compiled kernels' assembly, run on all codes by numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_dspark.kernels.grouped_reference import E2M1
from sglang_dspark.kernels.grouped_weights import _CODES_TO_BF16, _E8M0_TO_BF16
from tests.kernels.packed_ptx import count_instructions, run_ptx


def bf16(register: np.ndarray) -> torch.Tensor:
    """[*, 2] of packed registers."""
    return torch.from_numpy(np.ascontiguousarray(register)[..., None].view(np.int16)).view(
        torch.bfloat16
    )


def bits(values: torch.Tensor) -> torch.Tensor:
    """BF16 bits, one NaN for all, so that zeros have signs."""
    return values.bfloat16().masked_fill(values.isnan(), float("nan")).view(torch.int16)


def test_assembly_reads_every_e8m0_code() -> None:
    codes = np.arange(256, dtype=np.uint32)
    four = codes | (codes[::-1] << 8) | (codes << 16) | (np.roll(codes, 7) << 24)
    low, high = map(bf16, run_ptx(_E8M0_TO_BF16.value, {2: four}, 2))
    places = (codes, codes[::-1], codes, np.roll(codes, 7))
    found = (low[:, 0], low[:, 1], high[:, 0], high[:, 1])
    for values, wanted in zip(found, places, strict=True):
        expected = torch.ldexp(
            torch.ones(256).double(), torch.from_numpy(wanted.astype("i8")) - 127
        )
        expected[torch.from_numpy(wanted == 255)] = float("nan")
        assert torch.equal(bits(values), bits(expected))


@pytest.mark.parametrize("scale", [2.0**-127, 2.0**-126, 0.5, 1, 2, 4, 8, 2.0**126, 2.0**127,
                                   448.0, 0.0, 2.0**-9, -0.4375, float("nan")])  # fmt: skip
def test_assembly_multiplies_every_code_by_its_own_scale(scale: float) -> None:
    """All 65536 fours in the low half beside others in the high half, which has scale 1."""
    fours = np.arange(1 << 16, dtype=np.uint32)
    other = (fours * 40503 + 11) & 0xFFFF
    factor = int(torch.tensor(scale).bfloat16().view(torch.int16)) & 0xFFFF
    factors = np.full(fours.shape, factor | 0x3F800000, np.uint32)
    tiles = run_ptx(_CODES_TO_BF16.value, {4: fours | other << 16, 5: factors}, 4)
    table = torch.tensor(E2M1)
    for j, tile in enumerate(map(bf16, tiles)):
        low, high = (
            table[torch.from_numpy((f >> 4 * j & 15).astype("i8"))] for f in (fours, other)
        )
        assert torch.equal(bits(tile[:, 0]), bits(low * torch.tensor(scale))), j
        assert torch.equal(bits(tile[:, 1]), bits(high)), j


def test_assembly_is_short() -> None:
    """21 instructions for 8 codes; a conversion by way of float32 had 11 or 12 for each."""
    assert count_instructions(_CODES_TO_BF16.value) <= 8 * 2.75
    assert count_instructions(_E8M0_TO_BF16.value) <= 4 * 2
