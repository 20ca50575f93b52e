"""Experts as codes: allocated once, joined without a copy, the values of the format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sglang_dspark.backends.moe import expert_backends
from sglang_dspark.backends.moe.expert_backends import SharedByCodes, SharedRestored, shared_layers
from sglang_dspark.errors import DSparkError
from sglang_dspark.experts.backends import (
    BACKENDS,
    ExpertWeights,
    ExpertWorkload,
    _stacked,
    joined,
)
from sglang_dspark.experts.coded import CodedExperts, CodedShared
from sglang_dspark.experts.dispatch import Chooser, RoutedExperts
from sglang_dspark.quantisation.checkpoint import (
    GLOBAL_SCALE,
    SCALE,
    empty_codes,
    quantised_shapes,
)
from sglang_dspark.quantisation.formats import dequantise, quantise
from sglang_dspark.quantisation.layout import Quantised
from tests.drafter.helpers import tiny_config

FORMATS = ("fp8", "mxfp4", "nvfp4")


def fill(module: nn.Module, key: str, values: Tensor, form: str) -> Quantised:
    """Values in the format, copied into the module's buffers."""
    part = quantise(values, form)
    module.get_buffer(key).copy_(part.payload)
    module.get_buffer(key + SCALE).copy_(part.scales)
    if part.global_scale is not None:
        module.get_buffer(key + GLOBAL_SCALE).copy_(part.global_scale)
    return part


def experts(form: str, inner: int = 256) -> tuple[CodedExperts, list[Quantised]]:
    torch.manual_seed(0)
    module = CodedExperts(form, 4, inner, 64)
    shapes = {"gate": (4, inner, 64), "up": (4, inner, 64), "down": (4, 64, inner)}
    return module, [
        fill(module, f"{name}_proj", torch.randn(shape) / 8, form) for name, shape in shapes.items()
    ]


def shared(form: str) -> CodedShared:
    torch.manual_seed(1)
    module = CodedShared(form, 64, 256)
    for part, shape in (
        (module.gate_proj, (256, 64)),
        (module.up_proj, (256, 64)),
        (module.down_proj, (64, 256)),
    ):
        fill(part, "weight", torch.randn(shape) / 8, form)
    return module


@pytest.mark.parametrize("form", FORMATS)
def test_codes_are_those_of_the_format(form: str) -> None:
    module, parts = experts(form)
    for own, part in zip(module.weights().restored(), parts, strict=True):
        assert torch.equal(own, dequantise(part))
    assert sum(b.numel() * b.element_size() for b in module.buffers()) == sum(
        part.nbytes for part in parts
    )


@pytest.mark.parametrize(("form", "inner"), [("fp8", 256), ("mxfp4", 32), ("mxfp4", 256)])
def test_gate_and_up_are_joined_without_a_copy(form: str, inner: int) -> None:
    module, (gate, up, _) = experts(form, inner)
    codes = module.weights().codes
    assert codes is not None
    whole, copied = joined(codes[0], codes[1]), joined(gate, up)
    assert whole.payload.data_ptr() == codes[0].payload.data_ptr()
    assert whole.scales is not None
    assert codes[0].scales is not None
    assert whole.scales.data_ptr() == codes[0].scales.data_ptr()
    assert whole.payload.is_contiguous()
    assert whole.scales.is_contiguous()
    assert copied.payload.data_ptr() not in (gate.payload.data_ptr(), codes[0].payload.data_ptr())
    assert torch.equal(dequantise(whole), dequantise(copied))
    swapped = joined(codes[1], codes[0])  # no halves in this order
    assert torch.equal(dequantise(swapped), dequantise(joined(up, gate)))


def test_halves_of_two_tensors_are_copied() -> None:
    """Places in storage alone do not make them one."""
    first, second = (empty_codes((2, 64, 64), "mxfp4").payload for _ in range(2))
    first.fill_(1)
    second.fill_(2)
    gate, up = first[:, :32], second[:, 32:]
    made = _stacked(gate, up)
    assert torch.equal(made, torch.cat([gate, up], 1))
    other = torch.cat([first, second], 0)
    assert torch.equal(_stacked(other[:1, :32], other[2:3, 32:])[0, 32:], other[2, 32:])


@pytest.mark.parametrize("form", FORMATS)
def test_shared_experts_are_one_expert(form: str) -> None:
    """Restored, as a module and by a backend that is given codes: bitwise the same."""
    module, x = shared(form), torch.randn(5, 64)
    with torch.no_grad():
        expected = module.restored(torch.float32)(x)
        assert torch.equal(module(x), expected)
        assert torch.equal(SharedRestored(module, torch.float32)(x), expected)
        chooser = Chooser(ExpertWorkload("cpu", form, 1, 256, 64, 1))
        chooser.drop("compiled", ValueError("skipped here"))
        by_codes = SharedByCodes(RoutedExperts(module.weights(), chooser))
        assert torch.equal(by_codes(x), expected)
        assert by_codes(x[:0]).shape == (0, 64)
    restored = module.restored(torch.bfloat16)
    assert {p.dtype for p in restored.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in restored.parameters())


def test_shared_experts_on_a_cpu_are_restored_when_they_are_called() -> None:
    shape = tiny_config(hidden_size=64, num_experts=4, experts_per_token=2,
                        moe_intermediate_size=256, expert_format="mxfp4")  # fmt: skip
    (layer,) = shared_layers([shared("mxfp4")], shape, False, torch.float32)
    assert isinstance(layer, SharedRestored)
    assert layer.module is None
    layer(torch.randn(2, 64))
    assert layer.module is not None


@pytest.mark.parametrize("form", FORMATS)
def test_backends_compute_with_codes(form: str) -> None:
    """The dtype of the rows is given, since codes have none."""
    module, _ = experts(form)
    shape = tiny_config(hidden_size=64, num_experts=4, experts_per_token=2,
                        moe_intermediate_size=256, expert_format=form)  # fmt: skip
    weights = expert_backends.weights_of(module, shape)
    chooser = expert_backends.chooser_for(weights, shape, ranks=2, dtype=torch.bfloat16)
    assert chooser.workload.dtype == torch.bfloat16
    assert chooser.workload.device == "cpu"
    assert expert_backends.chooser_for(weights, shape, ranks=2).workload.dtype == torch.float32
    gate, up, down = (part.bfloat16() for part in weights.restored())
    values = ExpertWeights(form, (gate, up, down))
    assert expert_backends.chooser_for(values, shape, ranks=2).workload.dtype == torch.bfloat16
    x, ids, own = torch.randn(9, 64), torch.randint(0, 4, (9, 2)), torch.rand(9, 2)
    with torch.no_grad():
        first, second = (BACKENDS[name].prepare(weights) for name in ("compiled", "torch"))
        torch.testing.assert_close(first(x, ids, own), second(x, ids, own), atol=1e-5, rtol=1e-4)


def test_nan_among_the_codes_is_named() -> None:
    module, _ = experts("fp8")
    module.get_buffer("up_proj").view(torch.uint8)[1, 2, 3] = 0xFF
    with pytest.raises(DSparkError, match="1 of 65536 up codes are NaN"):
        module.weights()


@pytest.mark.parametrize("form", FORMATS)
def test_empty_codes_are_like_quantised_ones(form: str) -> None:
    shape = (3, 130, 64)
    empty, made = empty_codes(shape, form), quantise(torch.ones(shape), form)
    for own, other in (
        (empty.payload, made.payload),
        (empty.scales, made.scales),
        (empty.global_scale, made.global_scale),
    ):
        assert (own is None) == (other is None)
        if own is not None and other is not None:
            assert (own.shape, own.dtype) == (other.shape, other.dtype)
    assert dict(quantised_shapes("", shape, form))[""] == empty.payload.shape
    if form != "fp8":
        with pytest.raises(DSparkError, match="no multiple of the format's block"):
            empty_codes((3, 4, 40), form)
