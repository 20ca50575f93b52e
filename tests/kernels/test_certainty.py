"""Confidence estimated by Triton: the reference's probabilities, NaN where it has NaN."""

from __future__ import annotations

import json

import pytest
import torch

from sglang_dspark.kernels.certainty import certainty_triton
from tests.kernels.processes import output_of

FEW, MANY = 16, 400  # steps


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_interpreted_kernel_equals_torch(count: int) -> None:
    report = json.loads(output_of("tests.kernels.interpreted_certainty", str(count)))
    assert report["worst"] <= 1e-6
    assert report["tilings"] <= 1e-7
    assert min(report["nan"], report["sure"]) >= count // 5
    assert report["positions"] >= 20 * count


def test_kernel_compiles_without_a_device() -> None:
    report = json.loads(output_of("tests.kernels.compiled_certainty"))
    assert {name.split(":")[0] for name in report} == {"80", "90", "100"}
    assert all(each["code"] > 0 for each in report.values())
    assert max(each["shared"] for each in report.values()) <= 48 * 1024


def test_no_requests_are_no_launch() -> None:
    assert certainty_triton(torch.zeros(0, 3, 9), torch.zeros(0)).shape == (0, 3)


@pytest.mark.parametrize(
    ("logits", "temperature", "message"),
    [
        (torch.zeros(2, 3, 9, dtype=torch.float64), torch.zeros(2), "not torch.float64"),
        (torch.zeros(2, 9, 3).transpose(1, 2), torch.zeros(2), "rows must be contiguous"),
        (torch.zeros(2, 3, 9), torch.zeros(3), r"need temperatures \[2\] float32, not \[3\]"),
        (torch.zeros(2, 3, 9), torch.zeros(2).double(), "torch.float64"),
    ],
)
def test_mistakes_are_named(logits: torch.Tensor, temperature: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        certainty_triton(logits, temperature)
