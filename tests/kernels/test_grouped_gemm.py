"""The grouped GEMM against float64, in the interpreter here and compiled where there is a GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from sglang_dspark.kernels.grouped_gemm import (
    launch_options,
    m_grouped_gemm_nt_contiguous,
    m_grouped_gemm_nt_masked,
)
from sglang_dspark.kernels.grouped_layout import (
    FP8,
    NO_TILE,
    GroupedOperands,
    MaskedOperands,
    Tiles,
    contiguous_tiles,
    masked_tiles,
)
from sglang_dspark.kernels.grouped_reference import (
    calc_diff,
    m_grouped_gemm_nt_contiguous_reference,
    m_grouped_gemm_nt_masked_reference,
)
from sglang_dspark.kernels.grouped_shapes import GroupedShape, grouped_shapes
from tests.kernels.processes import output_of


def test_interpreted_kernel_equals_float64() -> None:
    printed = output_of("tests.kernels.interpreted_grouped")
    report = json.loads(printed)
    assert len(report) == 2 * 3 * 2 * len(list(grouped_shapes()))
    for name, row in report.items():
        assert row["diff"] <= (1e-10 if "float32" in name else 2e-5), (name, row)
        assert row["shape"], name
        assert row["padding_zero"], name
        assert row["same_bits"], name
    assert sum(row["control"] > 0.1 for row in report.values()) > 60  # rows of others are seen


def written(tiles: Tiles, block_m: int) -> tuple[list[tuple[int, int]], list[int]]:
    """(row, expert) of all rows that are multiplied, and the rows that become zero."""
    multiplied, zero = [], []
    for expert, first in zip(tiles.expert.tolist(), tiles.first_row.tolist(), strict=True):
        if expert != NO_TILE:
            end, limit = int(tiles.ends[expert]), int(tiles.limits[expert])
            rows = range(first, min(first + block_m, limit))
            multiplied += [(row, expert) for row in rows if row < end]
            zero += [row for row in rows if row >= end]
    return multiplied, zero


@pytest.mark.parametrize("block_m", [16, 32, 128])
@pytest.mark.parametrize("shape", list(grouped_shapes()), ids=lambda s: s.name)
def test_tiles_cover_every_row_once(shape: GroupedShape, block_m: int) -> None:
    tiles = contiguous_tiles(shape.offsets(), shape.rows, block_m)
    owners = [e for e, count in enumerate(shape.counts) for _ in range(count)]
    padding = list(range(len(owners), shape.rows))
    assert written(tiles, block_m) == (list(enumerate(owners)), padding)

    slots = max(shape.counts) + 3
    counts = torch.tensor(shape.counts, dtype=torch.int32)
    found, zero = written(masked_tiles(counts, slots, block_m), block_m)
    places = [(e * slots + i, e) for e, count in enumerate(shape.counts) for i in range(count)]
    assert found == places
    assert sorted([*zero, *(row for row, _ in found)]) == list(range(slots * len(shape.counts)))


def test_tile_height_follows_the_groups() -> None:
    heights = [launch_options(m, False, False)["block_m"] for m in (0, 1, 16, 17, 100, 10**6)]
    assert heights == [16, 16, 16, 32, 128, 128]


def test_kernel_compiles_for_hopper_without_one() -> None:
    """Machine code of every format, for few and many rows: within the shared memory of a block, and
    large tiles on the warp-group tensor instructions."""
    printed = output_of("tests.kernels.compiled_grouped")
    report = json.loads(printed)
    assert len(report) == 6
    for name, row in report.items():
        assert 0 < row["shared"] <= 227 * 1024, (name, row)
        assert row["warp_group"] == name.endswith(" 128"), (name, row)


def good(fp8: bool = True) -> GroupedOperands:
    dtype = FP8 if fp8 else torch.bfloat16
    return GroupedOperands(
        torch.ones(6, 200).to(dtype),
        torch.ones(2, 130, 200).to(dtype),
        torch.tensor([0, 2, 5], dtype=torch.int32),
        torch.ones(6, 2) if fp8 else None,
        torch.ones(2, 2, 2) if fp8 else None,
    )


def test_reference_is_the_plain_product() -> None:
    out = m_grouped_gemm_nt_contiguous_reference(good())
    assert torch.equal(out, torch.tensor([200.0] * 5 + [0.0]).double()[:, None].expand(6, 130))
    scaled = replace(good(), weight_scale=torch.tensor([[[1.0, 0], [0, 2]], [[0, 1], [3, 0]]]))
    out = m_grouped_gemm_nt_contiguous_reference(scaled)
    assert out[0, [0, 127, 128, 129]].tolist() == [128, 128, 144, 144]
    assert out[4, [0, 127, 128, 129]].tolist() == [72, 72, 384, 384]
    assert calc_diff(out, out) == 0
    assert calc_diff(out * 0, out * 0) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": torch.tensor([0, 5, 2], dtype=torch.int32)}, "do not rise"),
        ({"offsets": torch.tensor([0, 2, 7], dtype=torch.int32)}, "do not rise"),
        ({"offsets": torch.tensor([1, 2, 5], dtype=torch.int32)}, "do not rise"),
        ({"offsets": torch.tensor([0, 2, 5])}, "int32"),
        ({"offsets": torch.tensor([0, 5], dtype=torch.int32)}, r"expected \[3\]"),
        ({"x": torch.ones(6, 199).to(FP8)}, "x has K = 199, weight has K = 200"),
        ({"x": torch.ones(6, 200)}, "no product of torch.float32"),
        ({"x_scale": None}, "x_scale is None"),
        ({"x_scale": torch.ones(6, 1)}, "x_scale is"),
        ({"weight_scale": torch.ones(2, 2, 3)}, "weight_scale is"),
        ({"weight_scale": torch.ones(2, 2, 2).double()}, "weight_scale is"),
        ({"x": torch.ones(200, 6).to(FP8).T}, "not contiguous"),
        ({"out_dtype": torch.float16}, "out_dtype"),
    ],
)
def test_operands_that_do_not_fit_are_named(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        m_grouped_gemm_nt_contiguous(replace(good(), **change))
    with pytest.raises(ValueError, match="which has no scales"):
        m_grouped_gemm_nt_contiguous(replace(good(fp8=False), x_scale=torch.ones(6, 2)))


def test_masked_operands_that_do_not_fit_are_named() -> None:
    ones = torch.ones(2, 4, 200).bfloat16()
    counts = torch.tensor([0, 4], dtype=torch.int32)
    fine = MaskedOperands(ones, torch.ones(2, 130, 200).bfloat16(), counts)
    assert m_grouped_gemm_nt_masked_reference(fine)[:, :, 0].tolist() == [[0] * 4, [200] * 4]
    none = replace(fine, x=ones[:, :0].contiguous(), counts=counts * 0)
    assert m_grouped_gemm_nt_masked(none).shape == (2, 0, 130)
    for change, message in (
        ({"counts": counts + 1}, "not within the 4 slots"),
        ({"counts": counts - 1}, "not within the 4 slots"),
        ({"counts": counts.long()}, "int32"),
        ({"x": ones[:1]}, "x has 1 experts, weight has 2"),
        ({"x": ones[0]}, r"expected \[E, C, K\]"),
        ({"x_scale": torch.ones(2, 4, 2)}, "which has no scales"),
    ):
        with pytest.raises(ValueError, match=message):
            m_grouped_gemm_nt_masked(replace(fine, **change))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_kernel_equals_float64() -> None:
    from tests.kernels.interpreted_grouped import cases

    for name, _, *layouts in cases():
        for given in layouts:
            parts = {k: v.cuda() for k, v in vars(given).items() if isinstance(v, torch.Tensor)}
            moved = replace(given, **parts)
            if isinstance(moved, GroupedOperands):
                out = m_grouped_gemm_nt_contiguous(moved)
                expected = m_grouped_gemm_nt_contiguous_reference(moved)
            else:
                out = m_grouped_gemm_nt_masked(moved)
                expected = m_grouped_gemm_nt_masked_reference(moved)
            assert calc_diff(out, expected) <= 1e-3, name
