"""Windows of a captured graph with Triton attention, staged in the graph's own buffer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from sglang_dspark.patches import registry
from sglang_dspark.patches.cuda.triton_attention import TritonAttention
from tests.step.windows import indptr_of


class Theirs:
    """Upstream's backend: it stages windows of one length."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self.qo_indptr = buffer

    def _update_target_verify_buffers(self, *given: Any) -> str:
        self.qo_indptr.fill_(-1)
        return "staged"


def backend_of(buffer: torch.Tensor) -> Any:
    return registry.derive(Theirs, TritonAttention)(buffer)  # type: ignore[call-arg]


def test_windows_are_padded_to_the_slots_of_the_graph() -> None:
    padded = SimpleNamespace(qo_indptr_device=indptr_of([3, 1, 0, 0]))
    layout = create_autospec(RaggedVerifyLayout, instance=True)
    layout.padded_to_bucket.return_value = padded
    buffer = torch.full((9,), 7, dtype=torch.int32)
    info = SimpleNamespace(ragged_verify_layout=layout)
    backend = backend_of(buffer)
    assert backend._update_target_verify_buffers(None, 4, None, info, None) == "staged"
    layout.padded_to_bucket.assert_called_once_with(padded_bs=4)
    assert buffer.tolist() == [0, 4, 6, 7, 8, -1, -1, -1, -1]


def test_a_pass_without_windows_stages_nothing() -> None:
    buffer = torch.full((3,), 7, dtype=torch.int32)
    backend_of(buffer)._update_target_verify_buffers(None, 2, None, SimpleNamespace(), None)
    assert buffer.tolist() == [-1] * 3
