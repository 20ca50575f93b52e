"""The host's side of a step: which layout a step verifies, and when a step goes the short way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("sglang")

from sglang_dspark.backends.cpu import device as device_module
from sglang_dspark.backends.cpu.device import HostDevice
from sglang_dspark.backends.cpu.ragged_layout import PackedRows
from tests.backends.cpu.step_world import worker_for
from tests.step.windows import indptr_of

GAMMA = 3


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> HostDevice:
    """On a worker that nothing but lengths and depth is read of."""
    monkeypatch.setattr(device_module.plain_step, "require_worker", lambda worker: None)
    return HostDevice(worker_for(GAMMA))


@pytest.mark.parametrize("lengths", [[0, 0], [3, 0], [1, 3, 2], [2], [GAMMA, GAMMA]])
def test_cut_windows_are_verified_as_they_were_cut(device: HostDevice, lengths: list[int]) -> None:
    step: Any = None
    layout = device.layout(step, indptr_of(lengths))
    assert layout.verify_lens_cpu == [n + 1 for n in lengths]
    assert layout.total_verify_tokens == sum(lengths) + len(lengths)


def test_lengths_are_the_engines_by_the_logits_of_this_step(device: HostDevice) -> None:
    asked: list[Any] = []

    class Engine:
        def admit(self, *arguments: Any) -> Any:
            asked.append(arguments)
            return np.array([2, 0])

    engine: Any = Engine()
    step: Any = object()
    indptr = device.admit(engine, step, torch.ones(2, GAMMA, dtype=torch.bfloat16))
    assert (indptr.tolist(), indptr.dtype) == ([0, 3, 4], torch.int32)
    assert asked[0][0] is step
    assert asked[0][1].dtype is torch.float32
    assert device.admit(engine, step, None).tolist() == [0, 3, 4]
    assert asked[1][1] is None


def test_a_rank_acts_on_the_outcome_of_the_first_one(device: HostDevice) -> None:
    """Its own rows accept one draft; rank 0 accepted none and drew another token."""
    sent: Any = iter((torch.tensor([0], dtype=torch.int32), torch.tensor([7])))
    tp_sync = SimpleNamespace(sync=lambda site, values: values.copy_(next(sent)))
    ids, logits = torch.tensor([[1, 2, 0, 0]]), torch.zeros(2, 9)
    logits[0, 2] = logits[1, 3] = 1.0
    inputs: Any = SimpleNamespace(
        ids=ids,
        batch=SimpleNamespace(sampling_info=None, seq_lens=torch.tensor([5])),
        proposal=SimpleNamespace(draft_block=SimpleNamespace(draft_tokens=ids[:, 1:])),
        rules=SimpleNamespace(seeds=None),
    )
    outputs = SimpleNamespace(next_token_logits=logits)
    verified: Any = SimpleNamespace(outputs=outputs, rows=(PackedRows([2], GAMMA + 1), None))

    def accepted(tp_sync: Any) -> Any:
        device._worker._tp_sync = tp_sync
        return device.accept(inputs, verified)

    outs = accepted(tp_sync)
    assert outs.commit_lens.tolist() == [1]
    assert outs.new_seq_lens.tolist() == [6]
    assert outs.out_tokens[0, 0] == 7
    alone = SimpleNamespace(sync=lambda site, values: values)
    own = accepted(alone)
    assert (own.commit_lens.tolist(), own.out_tokens[0, :2].tolist()) == ([2], [2, 3])


def test_a_chain_drafter_receives_prefills_and_committed_tokens(device: HostDevice) -> None:
    """The anchor and accepted drafts of each request; the second one's draft was rejected."""
    told: list[Any] = []
    context = SimpleNamespace(begin_prefill=told.append, commit=told.append)
    device._chain = SimpleNamespace(context=context)  # type: ignore[assignment]
    device._worker._need_mamba_verify_commit = False
    device.begin_prefill("batch")
    rows = PackedRows([2, 3], GAMMA + 1)
    window = SimpleNamespace(
        verify_ids=torch.arange(10, 15),
        verify_cache_loc=torch.arange(20, 25),
        positions=torch.arange(30, 35),
    )
    inputs: Any = SimpleNamespace(
        rules=SimpleNamespace(penalties=None),
        batch=SimpleNamespace(req_pool_indices=torch.tensor([4, 1])),
    )
    verified: Any = SimpleNamespace(rows=(rows, window), hidden=torch.arange(5.0)[:, None])
    device.commit(inputs, verified, SimpleNamespace(commit_lens=torch.tensor([2, 1])))
    batch, committed = told
    assert batch == "batch"
    assert committed.requests.tolist() == [4, 1]
    assert committed.tokens.tolist() == [10, 11, 12]
    assert committed.slots.tolist() == [20, 21, 22]
    assert committed.positions.tolist() == [30, 31, 32]
    assert committed.hidden.flatten().tolist() == [0, 1, 2]
