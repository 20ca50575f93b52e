"""The Triton admission against its torch reference and the host's planner, bit for bit."""

from __future__ import annotations

import json

import pytest
import torch

from sglang_dspark.benchmarks.shapes import GAMMAS, REQUESTS, batches
from sglang_dspark.kernels.admission import admit_torch, admit_triton
from tests.kernels.processes import output_of


def test_interpreted_kernel_equals_torch_and_the_host() -> None:
    printed = output_of("tests.kernels.interpreted")
    report = json.loads(printed)
    assert report["batches"] == len(REQUESTS) * len(GAMMAS)
    assert report["different"] == []
    assert report["mutants"] > 5  # ties are there to be broken wrongly


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
    confidence, drafts = torch.ones(2, 3), torch.tensor([1])
    with pytest.raises(ValueError, match="float32"):
        admit_torch(confidence.double(), drafts)
    with pytest.raises(ValueError, match="contiguous"):
        admit_torch(torch.ones(3, 2).T, drafts)
    with pytest.raises(ValueError, match="drafts must be"):
        admit_torch(confidence, torch.tensor(1))
    with pytest.raises(ValueError, match="limits must be"):
        admit_torch(confidence, drafts, limits=torch.ones(2))
