"""The grouped GEMM against float64, in the interpreter here and compiled where there is a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from sglang_dspark.benchmarks.grouped_shapes import (
    FORMATS,
    KINDS,
    GroupedShape,
    grouped_operands,
    grouped_shapes,
    random_weights,
)
from sglang_dspark.kernels.fp8_rows import fp8_rows
from sglang_dspark.kernels.grouped_config import tiling
from sglang_dspark.kernels.grouped_gemm import (
    m_grouped_gemm_nt_contiguous,
    m_grouped_scatter_nt_contiguous,
    m_grouped_swiglu_nt_contiguous,
)
from sglang_dspark.kernels.grouped_layout import (
    FP4_GROUPS,
    FP8,
    SCALE_BLOCK,
    GroupedOperands,
    Weights,
)
from sglang_dspark.kernels.grouped_moe import fused_experts, fused_experts_reference
from sglang_dspark.kernels.grouped_reference import (
    calc_diff,
    m_grouped_gemm_nt_contiguous_reference,
    weight_values,
)
from sglang_dspark.kernels.routing import route, sum_pairs
from sglang_dspark.quantisation.formats import dequantise
from sglang_dspark.quantisation.layout import Quantised
from tests.kernels.processes import output_of

# One process: the module computes its results once, slowly.
pytestmark = pytest.mark.xdist_group("grouped-gemm")

CONTIGUOUS = (m_grouped_gemm_nt_contiguous, m_grouped_gemm_nt_contiguous_reference)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return json.loads(output_of("tests.kernels.interpreted_grouped"))


def check(rows: dict[str, Any]) -> None:
    """float32 results to the last bits, bfloat16 and FP8 ones to their own rounding."""
    for name, row in rows.items():
        exact = "float32" in name and "to fp8" not in name
        assert row["diff"] <= (1e-10 if exact else 5e-6), (name, row)
        assert row["shape"], name
        assert row["padding_zero"], name
        assert row["same_bits"], name


def test_interpreted_products_equal_float64(report: dict[str, Any]) -> None:
    """Every format and every shape, odd shapes with all formats; the same bits whether three
    programs share the tiles or one makes all."""
    rows = report["products"]
    assert len(rows) == 3 * len(KINDS) + 27  # 27 of the 8 * 7 pairs of the other shapes
    for each in (*KINDS, *(shape.name for shape in grouped_shapes())):
        assert sum(each in name for name in rows) >= 3, each
    check(rows)
    assert sum(row["control"] > 0.1 for row in rows.values()) > 30  # rows of others are seen


def test_interpreted_codes_are_exact(report: dict[str, Any]) -> None:
    assert len(report["codes"]) == 16
    assert [name for name, same in report["codes"].items() if not same] == []


def test_interpreted_joined_products_equal_float64(report: dict[str, Any]) -> None:
    rows = report["joined"]
    assert len(rows) == 4
    check(rows)


def test_interpreted_swiglu_equals_float64(report: dict[str, Any]) -> None:
    rows = report["swiglus"]
    assert len(rows) == 2 * len(KINDS)
    check(rows)


def test_interpreted_gather_and_scatter_equal_float64(report: dict[str, Any]) -> None:
    rows = report["scatters"]
    assert len(rows) == 2 * len(KINDS)
    check(rows)


def test_interpreted_routing_equals_torch(report: dict[str, Any]) -> None:
    rows = report["routes"]
    assert len(rows) == 16
    assert [name for name, same in rows.items() if not same] == []


def test_interpreted_layer_equals_float64(report: dict[str, Any]) -> None:
    rows = report["layers"]
    assert len(rows) == 3 * len(KINDS)
    assert max(rows.values()) <= 1e-5, rows


def test_tile_height_follows_the_groups() -> None:
    heights = [tiling(m, "bf16", False, False, False).block_m for m in (0, 1, 16, 17, 100, 10**6)]
    assert heights == [16, 16, 16, 32, 128, 128]
    for form in FORMATS:
        for group in (1, 128):  # FP8 rows out: a tile has all columns of a scale
            assert tiling(group, form, form != "bf16", True, True).block_n == SCALE_BLOCK


@pytest.mark.parametrize("group", [1, 16, 17, 32])
def test_a_decode_tile_of_fp8_rows_fits_a_small_gpu(group: int) -> None:
    """Of an L4 or a 4090, which keep one stage less: two weights and rows of x, in bytes."""
    how = tiling(group, "fp8", True, True, True)
    stage = (2 * how.block_n + how.block_m) * how.block_k
    assert (how.num_stages - 1) * stage <= 99 * 1024


def test_kernels_compile_for_hopper_and_blackwell_without_one() -> None:
    """Machine code within the shared memory of a block, all products on warp-group tensor
    instructions."""
    report = json.loads(output_of("tests.kernels.compiled_grouped"))
    assert sum(name.startswith("90: ") for name in report) == 12
    assert sum(name.startswith("100: ") for name in report) == 2
    for name, row in report.items():
        assert 0 <= row["shared"] <= 227 * 1024, (name, row)
        assert row["warp_group"] == (":" in name), (name, row)
        # FP4 codes are converted in pairs: two products a pair and some for E8M0 scales.
        assert (row["packed"] >= 64) == ("fp4" in name), (name, row)
    for form in ("mxfp4", "nvfp4"):
        how = tiling(16, form, False, True, False)
        codes = 2 * how.block_n * how.block_k // (32 * how.num_warps)  # of a thread in a step
        assert 0 < report[f"90: bf16 x {form}, gate-up, 16"]["loop"] <= 4 * codes, form


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_programs_of_fp4_have_registers(form: str, swiglu: bool) -> None:
    """As many as are started on a processor, which has 65536."""
    how = tiling(12, form, False, swiglu, False)
    assert how.maxnreg is not None
    assert how.programs == 3
    assert how.programs * how.num_warps * 32 * how.maxnreg <= 65536
    assert "programs" not in how.as_options()
    assert "maxnreg" not in tiling(12, "bf16", False, swiglu, False).as_options()


@pytest.mark.parametrize("form", ["mxfp4", "nvfp4"])
def test_reference_reads_fp4_as_the_format_says(form: str) -> None:
    """All codes with all scales: the kernels' own decoder against the formats'."""
    every = torch.arange(256, dtype=torch.uint8)
    packed = every.repeat(256, 1)[None]  # [1, 256, 256], a row for each scale
    scales = every[None, :, None].expand(1, 256, 512 // FP4_GROUPS[form]).contiguous()
    overall = torch.tensor([0.37]) if form == "nvfp4" else None
    if form == "nvfp4":
        scales = scales.view(FP8)
    found = weight_values(Weights(packed, scales, overall))
    wanted = dequantise(Quantised(form, (1, 256, 512), packed, scales, overall))
    assert torch.equal(found.float().nan_to_num(7e7), wanted.nan_to_num(7e7))


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


def test_routed_operands_that_do_not_fit_are_named() -> None:
    pairs = torch.arange(6, dtype=torch.int32)
    weights = torch.ones(3, 2)
    for wrong, message in (
        ((pairs.long(), weights), r"pairs are \(6,\) torch.int64"),
        ((pairs[:5], weights), "pairs are"),
        ((pairs, weights.double()), "routing weights are"),
        ((pairs, weights[:2]), "4 routing weights for 6 rows"),
    ):
        with pytest.raises(ValueError, match=message):
            m_grouped_scatter_nt_contiguous(good(), *wrong)
    with pytest.raises(ValueError, match="gathered by the first"):
        m_grouped_scatter_nt_contiguous(replace(good(), pairs=pairs), pairs, weights)
    with pytest.raises(ValueError, match="pairs are"):
        m_grouped_swiglu_nt_contiguous(replace(good(), pairs=pairs, top_k=2))
    odd = torch.ones(2, 129, 200).to(FP8)
    with pytest.raises(ValueError, match="are odd"):
        m_grouped_swiglu_nt_contiguous(replace(good(), weight=odd))
    with pytest.raises(ValueError, match="ids are"):
        route(torch.ones(3, 2), 4)
    with pytest.raises(ValueError, match="to 0 experts"):
        route(torch.ones(3, 2).int(), 0)
    with pytest.raises(ValueError, match="no choices"):
        sum_pairs(torch.ones(3, 0, 8))
    with pytest.raises(ValueError, match="FP8 rows"):
        fp8_rows(torch.ones(3, 8))


def fp4(form: str) -> GroupedOperands:
    return grouped_operands(GroupedShape("small", (2, 3), 1, 6, 64), f"bf16 x {form}")


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("mxfp4", {"weight_scale": None}, "are no known format"),
        ("mxfp4", {"weight": torch.ones(2, 6, 32).byte().char()}, "are no known format"),
        ("mxfp4", {"weight": torch.ones(2, 6, 33).byte()}, "weight has K = 66"),
        ("mxfp4", {"weight_scale": torch.ones(2, 6, 4).byte()}, "weight_scale is"),
        ("mxfp4", {"weight_scale": torch.full((2, 6, 2), 255).byte()}, "24 values of weight_scale"),
        ("mxfp4", {"weight_global": torch.ones(2)}, "weight_global given"),
        ("nvfp4", {"weight_global": None}, "weight_global is None"),
        ("nvfp4", {"weight_global": torch.tensor([1.0, float("inf")])}, "1 values of weight_gl"),
        ("nvfp4", {"weight_scale": torch.ones(2, 6, 2).to(FP8)}, "weight_scale is"),
        ("bf16", {"weight": torch.full((2, 6, 64), float("nan")).bfloat16()}, "768 values"),
        ("bf16", {"x": torch.ones(6, 64).to(FP8)}, "no product of torch.float8_e4m3fn"),
    ],
)
def test_weights_that_do_not_fit_are_named(form, change, message) -> None:
    with pytest.raises(ValueError, match=message):
        m_grouped_gemm_nt_contiguous(replace(fp4(form), **change))


def test_an_unaligned_width_is_named() -> None:
    x = torch.ones(6, 48).bfloat16()
    weight = torch.ones(2, 6, 24).byte()
    scale = torch.ones(2, 6, 1).byte()
    with pytest.raises(ValueError, match="width 48, no multiple of 32"):
        m_grouped_gemm_nt_contiguous(replace(fp4("mxfp4"), x=x, weight=weight, weight_scale=scale))


def moved(given: GroupedOperands) -> Any:
    parts = {k: v.cuda() for k, v in vars(given).items() if isinstance(v, torch.Tensor)}
    return replace(given, **parts)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_kernels_equal_float64(kind: str) -> None:
    for shape in grouped_shapes():
        rows = moved(grouped_operands(shape, kind))
        out, expected = (f(rows) for f in CONTIGUOUS)
        assert calc_diff(out, expected) <= 1e-3, shape.name
        assert not out[sum(shape.counts) :].any()
        assert torch.equal(out, m_grouped_gemm_nt_contiguous(rows))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_layer_equals_float64_also_in_a_graph(kind: str) -> None:
    rows, form = kind.split(" x ")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 256, generator=generator).bfloat16().cuda()
    ids = torch.randint(-1, 8, (40, 2), generator=generator).cuda()
    weights = torch.rand(40, 2, generator=generator).cuda()
    gate_up = random_weights(generator, form, (8, 512, 256), "cuda")
    down = random_weights(generator, form, (8, 256, 256), "cuda")
    given = (x, ids, weights, gate_up, down)
    out = fused_experts(*given, rows == "fp8")
    assert calc_diff(out, fused_experts_reference(*given)) <= (5e-3 if rows == "fp8" else 1e-3)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = fused_experts(*given, rows == "fp8")
    ids.copy_(ids.flip(0))
    graph.replay()
    assert torch.equal(captured, fused_experts(*given, rows == "fp8"))
