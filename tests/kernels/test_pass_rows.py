"""Indexing of a pass's rows by Triton: its torch reference, and SGLang's own functions."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.ops.speculative.dspark.dspark_verify_window import BuildRaggedVerifyWindow
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from sglang_dspark.benchmarks.pass_rows import Pass
from sglang_dspark.kernels.pass_rows import rows_torch
from tests.kernels.pass_row_shapes import passes
from tests.kernels.processes import output_of

FEW, MANY = 100, 2000  # passes


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_interpreted_kernel_equals_torch(count: int) -> None:
    report = json.loads(output_of("tests.kernels.interpreted_pass_rows", str(count)))
    assert report["wrong"] == []
    assert report["requests"] >= 10 * count
    assert min(report["spare"], report["full"]) >= count // 8


def test_kernel_compiles_without_a_device() -> None:
    report = json.loads(output_of("tests.kernels.compiled_pass_rows"))
    assert {name.split(":")[0] for name in report} == {"80", "90", "100"}
    assert all(each["code"] > 0 for each in report.values())
    assert max(each["shared"] for each in report.values()) <= 48 * 1024


@pytest.mark.parametrize("given", list(passes(60)))
def test_rows_are_upstreams(given: Pass) -> None:
    lens = given.lens.long()
    layout = RaggedVerifyLayout.from_verify_lens_device(
        verify_lens=given.indptr.diff(), graph_num_tokens=given.tokens
    )
    requests, width = given.ids.shape
    theirs = BuildRaggedVerifyWindow.torch(
        batch=SimpleNamespace(seq_lens=lens, req_pool_indices=given.owners),
        layout=layout,
        draft_block_ids=given.ids[:, :-1].contiguous(),
        draft_tokens=given.ids[:, 1:].contiguous(),
        bs=requests,
        device="cpu",
        verify_num_draft_tokens=width,
        model_runner=SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=given.table)),
    )
    rows = rows_torch(*given)
    assert torch.equal(rows.positions, theirs.positions)
    assert torch.equal(rows.ids, theirs.verify_ids)
    assert torch.equal(rows.places, theirs.window_index)
    assert torch.equal(rows.slots, theirs.verify_cache_loc)
    for windows, cap in ((rows.whole, None), (rows.capped, width)):
        padded = layout.padded_to_bucket(padded_bs=given.slots, cap=cap)
        assert torch.equal(windows.lens, padded.verify_lens)
        assert torch.equal(windows.indptr, padded.qo_indptr_device)
        assert windows.indptr.dtype == padded.qo_indptr_device.dtype


def test_rows_known_by_hand() -> None:
    table = torch.arange(40).view(4, 10).int()
    rows = rows_torch(
        torch.tensor([0, 2, 3], dtype=torch.int32),
        torch.tensor([[11, 12, 13], [21, 22, 23]]),
        torch.tensor([4, 7]),
        torch.tensor([3, 1]),
        table,
        7,
        4,
    )
    assert rows.positions.tolist() == [4, 5, 7, 0, 0, 0, 0]
    assert rows.slots.tolist() == [34, 35, 17, 0, 0, 0, 0]
    assert rows.ids.tolist() == [11, 12, 21, 0, 0, 0, 0]
    assert rows.places.tolist() == [0, 1, 3, -1, -1, -1, -1]
    assert rows.whole.lens.tolist() == [2, 1, 2, 2]
    assert rows.capped.indptr.tolist() == [0, 2, 3, 5, 7]


def test_mistakes_are_named() -> None:
    given = next(passes(1))
    with pytest.raises(ValueError, match="no fewer slots"):
        rows_torch(*given._replace(slots=len(given.ids) - 1))
    with pytest.raises(ValueError, match="indptr must be int32"):
        rows_torch(*given._replace(indptr=given.indptr.long()))
