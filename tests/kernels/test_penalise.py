"""Penalties of verify windows by Triton: the torch reference, bit by bit."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from sglang_dspark.kernels.penalise import penalise_triton
from tests.kernels.penalise_shapes import Step, steps
from tests.kernels.processes import output_of

FEW, MANY = 60, 600  # steps


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_interpreted_kernel_equals_torch(count: int) -> None:
    report = json.loads(output_of("tests.kernels.interpreted_penalise", str(count)))
    assert report["wrong"] == []
    assert report["changed"] >= 1000 * count
    assert min(report["forbidden"], report["untouched"]) >= count


def test_kernel_compiles_without_a_device() -> None:
    report = json.loads(output_of("tests.kernels.compiled_penalise"))
    assert {name.split(":")[0] for name in report} == {"80", "90", "100"}
    assert all(each["code"] > 0 for each in report.values())
    assert all(each["fused"] == 0 for each in report.values()), "products are rounded before sums"
    assert max(each["shared"] for each in report.values()) <= 48 * 1024


def given() -> Step:
    return next(steps(1, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": torch.zeros(1, 77, dtype=torch.int64)}, r"need a window \[R, W\]"),
        ({"table": torch.zeros(1, 1, dtype=torch.int32)}, r"counts \[slots, V\], not"),
        ({"outputs": torch.zeros(77, dtype=torch.int64)}, "differ in length: .*77"),
        ({"rows": given().rows.int()}, "places and window must be int64"),
        ({"table": given().table.long()}, "counts int32"),
        ({"logits": given().logits.transpose(0, 2).contiguous().transpose(0, 2)}, "contiguous"),
    ],
)
def test_mistakes_are_named(change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        penalise_triton(*given()._replace(**change))


def test_stops_have_a_row_for_each_request() -> None:
    step = given()
    stops = step.penalties.stops
    for wrong in (stops.repeat(3, 1), torch.cat([stops, stops], 1)[:, ::2]):
        with pytest.raises(ValueError, match="penalise: "):
            penalise_triton(*step._replace(penalties=replace(step.penalties, stops=wrong)))
