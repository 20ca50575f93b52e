"""Test Humming as a backend: its layer holds our weights, and its place in the order."""

from __future__ import annotations

import pytest
import torch

from sglang_dspark.backends.moe import expert_backends
from sglang_dspark.backends.moe.humming_experts import HummingLayer
from sglang_dspark.experts import backends as registry
from sglang_dspark.experts.backends import BACKENDS, ExpertWorkload, joined
from sglang_dspark.experts.dispatch import choose
from sglang_dspark.quantisation.formats import dequantise, quantise
from sglang_dspark.quantisation.layout import Quantised

HOPPER = ExpertWorkload(
    "cuda", "mxfp4", inner=256, width=512, capability=(9, 0), dtype=torch.bfloat16
)


def restored(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Two codes a byte, E8M0 scales of 32 -> float32, by our format."""
    shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    part = Quantised("mxfp4", shape, codes.view(torch.uint8), scales.view(torch.uint8))
    return dequantise(part)


def test_the_layer_holds_gate_before_up_in_the_types_that_are_read() -> None:
    torch.manual_seed(0)
    gate, up = (quantise(torch.randn(3, 64, 128), "mxfp4") for _ in range(2))
    down = quantise(torch.randn(3, 128, 64), "mxfp4")
    layer = HummingLayer(joined(gate, up), down)
    names = dict(layer.named_parameters())
    assert {name: each.dtype for name, each in names.items()} == {
        "w13_weight": torch.int8,
        "w13_weight_scale": torch.float8_e8m0fnu,
        "w2_weight": torch.int8,
        "w2_weight_scale": torch.float8_e8m0fnu,
    }
    first = restored(names["w13_weight"].data, names["w13_weight_scale"].data)
    assert torch.equal(first[:, :64], dequantise(gate))
    assert torch.equal(first[:, 64:], dequantise(up))
    last = restored(names["w2_weight"].data, names["w2_weight_scale"].data)
    assert torch.equal(last, dequantise(down))
    assert (layer.num_local_experts, layer.hidden_size) == (3, 128)
    assert layer.intermediate_size_per_partition == 64


@pytest.mark.parametrize("installed", [False, True])
def test_it_is_offered_where_it_is_installed_and_taken_when_it_was_quicker(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    there = {"triton", "sglang", *(["humming"] if installed else [])}
    monkeypatch.setattr(
        registry, "find_spec", lambda package: package if package in there else None
    )
    assert expert_backends.humming_experts.BACKEND is BACKENDS["humming"]
    times = {"triton": 20.0, "humming": 9.0}
    found = choose(HOPPER, times if installed else {"triton": 20.0})
    assert found.backend == ("humming" if installed else "triton")
    if not installed:
        assert found.passed_over["humming"] == "humming is not installed"
    assert choose(HOPPER).backend == "triton", "nothing was measured"
