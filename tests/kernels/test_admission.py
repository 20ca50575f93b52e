"""The Triton admission against its torch reference and the host's planner, bit for bit."""

from __future__ import annotations

import json

import pytest
import torch

from sglang_dspark.benchmarks.shapes import GAMMAS, REQUESTS, batches
from sglang_dspark.kernels.admission import LOGIT_LIMIT, admit_torch, admit_triton
from sglang_dspark.schedule import online
from tests.kernels.processes import output_of

FEW, MANY = 420, 10_000  # batches beside those of every shape; their kinds repeat after 420


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_interpreted_kernel_equals_torch_and_the_host(count: int) -> None:
    report = json.loads(output_of("tests.kernels.interpreted", str(count)))
    assert report["batches"] == count + len(REQUESTS) * len(GAMMAS)
    assert report["different"] == []
    # What could be wrong is there: ties that rank, and budgets that cut.
    assert report["by_request"] > count // 20
    assert report["cut"] > count // 2


def test_logits_are_bounded_as_on_the_host() -> None:
    assert LOGIT_LIMIT == online.LOGIT_LIMIT


def test_kernel_compiles_without_a_device() -> None:
    report = json.loads(output_of("tests.kernels.compiled_admission"))
    assert {name.split(":")[0] for name in report} == {"80", "90", "100"}
    assert all(each["code"] > 0 for each in report.values())
    assert max(each["shared"] for each in report.values()) <= 48 * 1024
    assert all(each["fused"] == 0 for each in report.values())  # rounded as on the host


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_kernel_equals_torch() -> None:
    for case in batches("cuda"):
        assert torch.equal(admit_triton(*case), admit_torch(*case))


def test_benchmark_says_what_it_needs() -> None:
    printed = output_of("sglang_dspark.benchmarks.admission")
    if torch.cuda.is_available():
        assert json.loads(printed.splitlines()[0])["op"] == "admission"
    else:
        assert "no CUDA device" in printed


def test_mistakes_are_named() -> None:
    logits, terms = torch.ones(2, 3), torch.ones(2, 9, dtype=torch.float64)
    with pytest.raises(ValueError, match="floating"):
        admit_torch(logits.int(), terms, 1)
    with pytest.raises(ValueError, match="contiguous"):
        admit_torch(torch.ones(3, 2).T, terms, 1)
    with pytest.raises(ValueError, match=r"terms must be \(2, 9\) float64"):
        admit_torch(logits, terms[:, :8], 1)
    with pytest.raises(ValueError, match="terms must be"):
        admit_torch(logits, terms.float(), 1)
    with pytest.raises(ValueError, match="drafts must be"):
        admit_torch(logits, terms, -1)
