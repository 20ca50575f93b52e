"""Packed windows of gated delta rule layers: each row as in windows of one length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention.linear.gdn_backend import GDNAttnBackend, GDNKernelDispatcher
from sglang.srt.layers.attention.linear.utils import LinearAttnKernelBackend
from sglang.srt.layers.attention.mamba.mamba2_metadata import ForwardMetadata
from sglang.srt.mem_cache.memory_pool import MambaPool
from torch import Tensor

from sglang_dspark.patches.step.delta_windows import PackedDeltaRule, _places

HEADS, SIZE, WIDTH, DIM = (
    2,
    4,
    4,
    6,
)  # value heads, their size, gamma + 1, channels of v + 2 of q, k
CHANNELS = 2 * SIZE + HEADS * SIZE


class Backend(PackedDeltaRule, GDNAttnBackend):  # type: ignore[misc]
    without: int | None = None  # a request without a slot
    """As the seam derives it, without a model runner."""

    def __init__(self, requests: int) -> None:
        """Draw states of `requests` and their layer."""
        self.supports_ragged_verify_graph = True
        torch.manual_seed(requests)
        triton = LinearAttnKernelBackend("triton")
        self.kernel_dispatcher = GDNKernelDispatcher(triton, triton, triton)
        self.verify_intermediate_state_indices = torch.arange(requests + 2, dtype=torch.int32)
        self.mis_metadata, self._use_strided_target_verify_qkv = None, False
        self.cache = MambaPool.SpeculativeState(
            conv=[torch.randn(requests + 3, CHANNELS, 3)],
            temporal=torch.randn(requests + 3, HEADS, SIZE, SIZE),
            intermediate_ssm=torch.zeros(requests + 2, WIDTH, HEADS, SIZE, SIZE),
            intermediate_conv_window=[torch.zeros(requests + 2, WIDTH, CHANNELS, 3)],
        )
        pool = SimpleNamespace(replayssm_spec_fold=False, replayssm_is_kda=False)
        self.req_to_token_pool = SimpleNamespace(
            size=requests + 2, mamba_pool=pool, mamba2_layer_cache=lambda layer: self.cache
        )
        self.layer = SimpleNamespace(
            layer_id=0, num_q_heads=1, num_k_heads=1, num_v_heads=HEADS, q_dim=SIZE, k_dim=SIZE,
            v_dim=HEADS * SIZE, head_q_dim=SIZE, head_k_dim=SIZE, head_v_dim=SIZE,
            conv_weights=torch.randn(CHANNELS, 4), bias=None, activation="silu",
            A_log=torch.randn(HEADS), dt_bias=torch.randn(HEADS),
        )  # fmt: skip

    def run(self, starts: Tensor, rows: tuple[Tensor, ...], layout: Any) -> Tensor:
        """Run windows; layout: None for windows of one length."""
        slots = torch.arange(2, len(starts) + 1, dtype=torch.int32)  # slot r + 2 of request r
        if self.without is not None:
            slots[self.without] = -1
        self.forward_metadata = ForwardMetadata(query_start_loc=starts, mamba_cache_indices=slots)
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_target_verify=lambda: True),
            spec_info=SimpleNamespace(draft_token_num=WIDTH, ragged_verify_layout=layout),
            req_pool_indices=slots,
        )
        return self.forward_extend(self.layer, batch, *rows)


@pytest.mark.parametrize("lengths", [[4, 1, 3], [1, 1], [4, 4], [2]])
@pytest.mark.parametrize("padding", [0, 3])
def test_rows_are_those_of_whole_windows(lengths: list[int], padding: int) -> None:
    requests, total = len(lengths), sum(lengths)
    backend = Backend(requests)
    whole = tuple(torch.randn(requests * WIDTH, n) for n in (CHANNELS, HEADS, HEADS))
    starts = torch.arange(0, requests * WIDTH + 1, WIDTH, dtype=torch.int32)
    expected = backend.run(starts, whole, None)[0]
    states = backend.cache.intermediate_ssm.clone()
    inputs = backend.cache.intermediate_conv_window[0].clone()
    before = backend.cache.temporal.clone(), backend.cache.conv[0].clone()
    backend.cache.intermediate_ssm.fill_(7)
    backend.cache.intermediate_conv_window[0].fill_(7)
    chosen = torch.cat([r * WIDTH + torch.arange(n) for r, n in enumerate(lengths)])
    rows = tuple(torch.cat((x[chosen], torch.full((padding, x.shape[1]), 1e30))) for x in whole)
    packed = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    found = backend.run(packed, rows, object())[0]
    assert torch.equal(found[:total], expected[chosen])
    assert not found[total:].any()  # rows that a graph pads: finite, and in no window
    for row, length in enumerate(lengths):
        assert torch.equal(backend.cache.intermediate_ssm[row, :length], states[row, :length])
        assert (backend.cache.intermediate_ssm[row, length:] == 7).all()  # a short one stores few
        kept = backend.cache.intermediate_conv_window[0][row, :length]
        assert torch.equal(kept, inputs[row, :length])
    assert torch.equal(backend.cache.temporal, before[0])
    assert torch.equal(backend.cache.conv[0], before[1])


def test_places_of_rows() -> None:
    starts = torch.tensor([0, 2, 2, 5], dtype=torch.int32)  # a graph's window without rows
    slots = torch.tensor([3, 1, 4])
    assert _places(starts, slots, 7, WIDTH).tolist() == [0, 1, 8, 9, 10, 12, 12]
    slots[0] = -1
    assert _places(starts, slots, 7, WIDTH).tolist() == [12, 12, 8, 9, 10, 12, 12]


def test_rows_of_a_request_without_a_slot_are_zero() -> None:
    """A graph's request of padding: kernels leave its rows unwritten."""
    found = []
    for without in (None, 1):
        backend = Backend(2)
        backend.without = without
        torch.manual_seed(3)
        rows = tuple(torch.randn(5, n) for n in (CHANNELS, HEADS, HEADS))
        backend.cache.temporal[-1] = torch.nan  # slot -1
        found.append(backend.run(torch.tensor([0, 3, 5], dtype=torch.int32), rows, object())[0])
    assert torch.equal(found[0][:3], found[1][:3])
    assert found[0][3:].any()
    assert not found[1][3:].any()


@pytest.mark.parametrize(
    ("verifies", "replays", "packed"),
    [("triton", False, True), ("flashinfer", False, False), ("triton", True, False)],
)
def test_only_tritons_kernel_takes_packed_windows(
    verifies: str, replays: bool, packed: bool
) -> None:
    class Stock:
        def __init__(self, model_runner: Any) -> None:
            """Choose kernels as upstream does, and note what runs."""
            triton, other = object(), object()
            chosen = triton if verifies == "triton" else other
            self.kernel_dispatcher = SimpleNamespace(
                verify_kernel=chosen, tree_verify_kernel=triton
            )
            pool = SimpleNamespace(enable_linear_replayssm_spec=replays)
            self.req_to_token_pool = SimpleNamespace(mamba_pool=pool)

        def forward_extend(self, *given: Any) -> str:
            return "upstream's"

    class Derived(PackedDeltaRule, Stock):  # type: ignore[misc]
        pass

    backend = Derived(None)
    assert backend.supports_ragged_verify_graph == packed
    if not packed:
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_target_verify=lambda: True),
            spec_info=SimpleNamespace(ragged_verify_layout=object()),
        )
        assert backend.forward_extend(None, batch, None, None, None) == "upstream's"
