"""Packing of accepted rows by Triton: its torch reference on odd shapes, and rows known by hand."""

from __future__ import annotations

import json

import pytest
import torch

from sglang_dspark.benchmarks.commit_shapes import windows
from sglang_dspark.kernels.commit_rows import pack_torch, pack_triton
from tests.kernels.processes import output_of

CASES = 80


def test_interpreted_kernel_equals_torch() -> None:
    report = json.loads(output_of("tests.kernels.interpreted_commit", str(CASES)))
    assert report["wrong"] == []
    assert report["requests"] >= 800
    assert min(report["exact"], report["spare"], report["cut"]) > CASES // 8


def test_rows_known_by_hand() -> None:
    hidden = torch.arange(12.0).view(6, 2)  # three requests, windows of two rows
    emitted, lens = torch.tensor([2, 0, 1]), torch.tensor([10, 20, 30])
    slots = torch.tensor([[5, 6], [7, 8], [9, 4]])
    packed = pack_torch(hidden, emitted, lens, slots, 5)
    assert packed.hidden.tolist() == [[0, 1], [2, 3], [8, 9], [0, 0], [0, 0]]
    assert packed.positions.tolist() == [10, 11, 30, 0, 0]
    assert packed.slots.tolist() == [5, 6, 9, 0, 0]


def test_kernel_compiles_for_ampere_hopper_and_blackwell_without_one() -> None:
    report = json.loads(output_of("tests.kernels.compiled_commit"))
    assert {name.split(":")[0] for name in report} == {"80", "90", "100"}
    assert all(each["code"] > 0 for each in report.values())
    assert max(each["shared"] for each in report.values()) <= 48 * 1024


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_kernel_equals_torch() -> None:
    for given in windows(CASES, device="cuda"):
        for found, expected in zip(pack_triton(*given), pack_torch(*given), strict=True):
            assert torch.equal(found, expected)


def test_benchmark_says_what_it_needs() -> None:
    printed = output_of("sglang_dspark.benchmarks.commit")
    if torch.cuda.is_available():
        assert json.loads(printed.splitlines()[0])["op"] == "commit"
    else:
        assert "no CUDA device" in printed


def test_mistakes_are_named() -> None:
    hidden, emitted, lens = torch.ones(6, 4), torch.tensor([1, 2]), torch.tensor([3, 4])
    slots = torch.ones(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="2 requests need"):
        pack_torch(hidden, emitted, lens, slots[:1], 3)
    with pytest.raises(ValueError, match=r"hidden must be \[6, F\]"):
        pack_torch(hidden[:5], emitted, lens, slots, 3)
    with pytest.raises(ValueError, match="slots must be int64"):
        pack_torch(hidden, emitted, lens, slots.int(), 3)
