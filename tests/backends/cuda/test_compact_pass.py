"""The compact pass on a CPU: what upstream's executor is given, and what it gives back."""

from __future__ import annotations

import inspect
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.speculative.dspark_components.dspark_verify import TargetVerifyExecutor
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from sglang_dspark.backends.cuda import compact_pass as module
from sglang_dspark.backends.cuda.compact_pass import compact_pass, padded_layout
from sglang_dspark.benchmarks.pass_rows import Pass
from sglang_dspark.kernels.pass_rows import rows_torch
from sglang_dspark.step.rules import Rules
from sglang_dspark.step.verify import VerifyInput, layout_of
from tests.kernels.pass_row_shapes import passes
from tests.step.windows import indptr_of

LENS, WIDTH, SLOTS, TOKENS = (2, 0), 4, 3, 8


def asked_of() -> VerifyInput:
    """A step of two requests, one with two admitted drafts and one with none."""
    batch = SimpleNamespace(
        seq_lens=torch.tensor([5, 7]),
        req_pool_indices=torch.tensor([1, 2]),
        sampling_info=None,
        return_logprob=False,
    )
    return VerifyInput(
        batch=batch,
        draft_input=None,
        window=SimpleNamespace(kv_loc_plan=object()),
        proposal=None,
        layout=layout_of(indptr_of(list(LENS)), TOKENS),
        ids=torch.arange(2 * WIDTH).view(2, WIDTH),
        drafted=True,
        foldable=True,
        rules=Rules(),
    )


def worker_of(replayed: bool, epilogue: Any, called: list[dict[str, Any]]) -> Any:
    """A worker whose executor runs no model: its logits are the rows' token ids."""

    def run_ragged(**given: Any) -> Any:
        called.append(given)
        compact = given["ragged_window"].verify_ids[:, None].float()
        outputs = SimpleNamespace(next_token_logits=compact, hidden_states=-compact)
        return SimpleNamespace(logits_output=outputs, can_run_cuda_graph=replayed)

    pool = SimpleNamespace(req_to_token=torch.arange(60).view(3, 20))
    return SimpleNamespace(
        device="cpu",
        _verify_executor=SimpleNamespace(verify_epilogue=epilogue, _run_ragged=run_ragged),
        model_runner=SimpleNamespace(req_to_token_pool=pool),
    )


PACKED = [[0.0], [1.0], [2.0], [4.0], [0.0], [0.0], [0.0], [0.0]]
WINDOWS = [[0.0], [1.0], [2.0], [0.0], [4.0], [0.0], [0.0], [0.0]]
MASKS = SimpleNamespace(sampling_mask_batch_indices=torch.tensor([0]))
SAMPLED = SimpleNamespace(sampling_mask_batch_indices=None)


@pytest.mark.parametrize(
    ("replayed", "changed", "logits"),
    [
        (True, {}, PACKED),
        (True, {"sampling_info": SAMPLED}, PACKED),
        (False, {}, WINDOWS),
        (True, {"return_logprob": True}, WINDOWS),
        (True, {"sampling_info": MASKS}, WINDOWS),
    ],
    ids=["accepted in the graph", "no masks", "eager", "logprobs", "masks"],
)
def test_logits_are_scattered_to_windows_where_they_are_read(
    replayed: bool, changed: dict[str, Any], logits: list[list[float]]
) -> None:
    begun: list[Any] = []
    epilogue = SimpleNamespace(
        begin_step=lambda lens, armed: begun.append((lens.tolist(), armed)),
    )
    called: list[dict[str, Any]] = []
    asked = asked_of()
    asked.batch.__dict__.update(changed)
    worker = worker_of(replayed, epilogue, called)
    run_ragged = worker._verify_executor._run_ragged

    def staged(**given: Any) -> Any:
        assert begun, "the graph reads the lengths of the step before"
        return run_ragged(**given)

    worker._verify_executor._run_ragged = staged
    done = compact_pass(worker, asked, SLOTS, None, anchors=False)
    (given,) = called
    assert begun == [([3, 1], True)]
    assert given["kv_loc_plan"] is asked.window.kv_loc_plan
    assert given["ragged_window"].positions.tolist() == [5, 6, 7, 7, 0, 0, 0, 0]
    assert done.in_graph == replayed
    assert done.rows.positions is given["ragged_window"].positions
    assert done.outputs.next_token_logits.tolist() == logits
    assert done.hidden.tolist() == [[-each[0]] for each in PACKED], "rows stay packed"


def test_a_step_that_samples_reads_windows() -> None:
    asked = replace(asked_of(), foldable=False)
    done = compact_pass(worker_of(True, None, []), asked, SLOTS, None, anchors=False)
    assert done.outputs.next_token_logits.tolist() == WINDOWS


@pytest.mark.parametrize("replayed", [True, False])
def test_a_step_that_samples_anchors_reads_the_first_rows(
    replayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    adjusted: list[tuple[int, int]] = []
    monkeypatch.setattr(
        module.upstream,
        "apply_logits_adjustments_strided",
        lambda next_token_logits, sampling_info, verify_num_draft_tokens: adjusted.append(
            (len(next_token_logits), verify_num_draft_tokens)
        ),
    )
    alone = layout_of(indptr_of([0, 0]), TOKENS)
    asked = replace(asked_of(), foldable=False, drafted=False, layout=alone)
    done = compact_pass(worker_of(replayed, None, []), asked, SLOTS, None, anchors=True)
    assert done.outputs.next_token_logits.tolist() == [[0.0], [4.0]]
    assert adjusted == [(2, 1)]
    assert len(done.hidden) == TOKENS


@pytest.mark.parametrize("replayed", [True, False])
def test_logits_are_adjusted_by_the_settings_that_are_given(
    replayed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    adjust = SimpleNamespace(
        **{name: getattr(module.upstream, name) for name in (
            "RaggedVerifyWindow", "RaggedVerifyLayout", "ScatterCompactToStrided",
        )},
        apply_logits_adjustments_strided=lambda **given: seen.append(given["sampling_info"]),
    )  # fmt: skip
    monkeypatch.setattr(module, "upstream", adjust)
    info = object()
    compact_pass(
        worker_of(replayed, None, []),
        replace(asked_of(), foldable=False),
        SLOTS,
        info,
        anchors=False,
    )
    assert seen == [info]


@pytest.mark.parametrize("given", list(passes(20)))
def test_the_layout_pads_as_upstreams_does(given: Pass) -> None:
    """Also to numbers of slots and to widths that were not prepared."""
    width = given.ids.shape[1]
    plain = layout_of(given.indptr, given.tokens)
    padded = padded_layout(plain, rows_torch(*given), width)
    assert isinstance(padded, RaggedVerifyLayout)
    for slots in (given.slots, given.slots + 3):
        for cap in (None, width, width + 1):
            mine = padded.padded_to_bucket(padded_bs=slots, cap=cap)
            theirs = plain.padded_to_bucket(padded_bs=slots, cap=cap)
            for name in ("verify_lens", "extend_start_loc", "qo_indptr_device"):
                assert torch.equal(getattr(mine, name), getattr(theirs, name))
            for name in ("graph_num_tokens", "total_verify_tokens", "cap", "bs"):
                assert getattr(mine, name) == getattr(theirs, name)


def test_upstreams_executor_takes_these_arguments() -> None:
    called: list[dict[str, Any]] = []
    compact_pass(worker_of(False, None, called), asked_of(), SLOTS, None, anchors=False)
    inspect.signature(TargetVerifyExecutor._run_ragged).bind(None, **called[0])
