"""Formats against their definitions: every element code with every scale code, and quantisation of
ties, neighbours of ties and random weights, all bit for bit against rational arithmetic.
"""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from sglang_dspark.errors import DSparkError
from sglang_dspark.quantisation import FORMATS, Quantised, dequantise, quantise
from sglang_dspark.quantisation.fp8 import quantise_activations
from sglang_dspark.quantisation.minifloat import (
    decode_e2m1,
    pack_nibbles,
    round_e4m3,
    unpack_nibbles,
)
from tests.experts.exact import (
    E2M1,
    E4M3_POSITIVE,
    e2m1_value,
    e4m3_value,
    e8m0_value,
    floor_log2,
    nearest,
)


def as_float32(x: Fraction) -> float:
    """The float32 nearest to x, overflow included; numerators here are exact in float64."""
    return torch.tensor(float(x), dtype=torch.float64).float().item()


def e2m1_code(x: Fraction) -> int:
    code = nearest(x, E2M1)
    return code + 8 if x < 0 and code else code


def hard_weights(scale: float, seed: int = 0) -> torch.Tensor:
    """512 float32 weights: all ties of E2M1 at a scale, their float32 neighbours, random ones."""
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.5, 1.0, 3.0, 4.0]) * scale
    inf = torch.tensor(float("inf"))
    near = torch.cat([ties, torch.nextafter(ties, inf), torch.nextafter(ties, -inf)])
    random = torch.randn(512 - 2 * len(near), generator=torch.Generator().manual_seed(seed))
    return torch.cat([near, -near, random * scale * 2])


def test_all_nibbles_pack_and_unpack() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(pack_nibbles(unpack_nibbles(codes[None]))[0], codes)
    assert unpack_nibbles(torch.tensor([0xA3], dtype=torch.uint8)).tolist() == [0x3, 0xA]
    values = decode_e2m1(torch.arange(16, dtype=torch.uint8))
    assert [Fraction(v) for v in values.tolist()] == [e2m1_value(c) for c in range(16)]
    assert torch.signbit(values[8])


def test_mxfp4_all_codes_with_all_scales() -> None:
    codes = torch.arange(16, dtype=torch.uint8).repeat(2).expand(256, 32)
    scales = torch.arange(256, dtype=torch.uint8)[:, None]
    found = dequantise(Quantised("mxfp4", (256, 32), pack_nibbles(codes), scales))
    for s in range(256):
        scale = e8m0_value(s)
        for c in range(16):
            value = found[s, c].item()
            if scale is None:
                assert value != value
            else:
                assert value == as_float32(e2m1_value(c) * scale), (s, c)
    assert found[254, 7] == float("inf")  # 6 x 2^127: what float32 cannot hold
    assert found[252, 7].item() == 6 * 2.0**125


@pytest.mark.parametrize("overall", [1.0, 0.37, 3e-12])
def test_nvfp4_all_codes_with_all_scales(overall: float) -> None:
    codes = torch.arange(16, dtype=torch.uint8).expand(256, 16)
    scales = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    whole = torch.tensor(overall)
    found = dequantise(Quantised("nvfp4", (256, 16), pack_nibbles(codes), scales, whole))
    exact = Fraction(whole.item())
    for s in range(256):
        scale = e4m3_value(s)
        for c in range(16):
            value = found[s, c].item()
            if scale is None:
                assert value != value
            else:
                assert value == as_float32(e2m1_value(c) * scale * exact), (s, c)


@pytest.mark.parametrize("scale", [1e-20, 0.0021, 1.0, 7e18])
def test_fp8_all_codes_with_a_scale(scale: float) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, None]
    scales = torch.tensor([[scale], [scale * 3]])
    found = dequantise(Quantised("fp8", (256, 1), codes, scales))
    for c in range(256):
        exact, value = e4m3_value(c), found[c, 0].item()
        if exact is None:
            assert value != value
        else:
            assert value == as_float32(exact * Fraction(scales[c // 128, 0].item())), c


def test_e4m3_rounds_every_tie_to_even() -> None:
    values = torch.tensor([float(v) for v in E4M3_POSITIVE], dtype=torch.float64)
    middle = (values[1:] + values[:-1]) / 2
    step = (values[1:] - values[:-1]) * 2.0**-40
    x = torch.cat([values, middle, middle + step, middle - step])
    x = torch.cat([x, -x])
    found = round_e4m3(x).view(torch.uint8).tolist()
    for v, code in zip(x.tolist(), found, strict=True):
        assert code & 127 == nearest(Fraction(v), E4M3_POSITIVE), v
        assert code >> 7 == (torch.signbit(torch.tensor(v)).item()), v
    assert round_e4m3(torch.tensor([464.0, 1e9]).double()).float().tolist() == [448, 448]
    # float64 -> float32 -> E4M3 would round this one twice: it is just above the tie at 17
    above = torch.tensor([17 + 2.0**-40], dtype=torch.float64)
    assert round_e4m3(above).float().item() == 18
    assert above.float().to(torch.float8_e4m3fn).float().item() == 16


@pytest.mark.parametrize("scale", [1.0, 2.0**-120, 2.0**100])
def test_mxfp4_quantises_as_defined(scale: float) -> None:
    weight = hard_weights(scale).view(4, 128)
    weight[3, 32:64] = 0
    q = quantise(weight, "mxfp4")
    assert q.scales is not None
    codes = unpack_nibbles(q.payload)
    for row in range(4):
        for block in range(4):
            part = [Fraction(v) for v in weight[row, block * 32 : block * 32 + 32].tolist()]
            amax = max(map(abs, part))
            byte = max(floor_log2(amax) - 2 + 127, 0) if amax else 0
            assert q.scales[row, block] == byte
            expected = [e2m1_code(v / Fraction(2) ** (byte - 127)) for v in part]
            assert codes[row, block * 32 : block * 32 + 32].tolist() == expected


def test_mxfp4_at_the_ends_of_float32() -> None:
    weight = torch.zeros(3, 32)
    weight[0, 0], weight[1, 0], weight[2, 0] = torch.finfo(torch.float32).max, 2.0**-149, 2.0**-126
    q = quantise(weight, "mxfp4")
    assert q.scales is not None
    assert q.scales.flatten().tolist() == [252, 0, 0]
    assert unpack_nibbles(q.payload)[:, 0].tolist() == [7, 0, 4]


@pytest.mark.parametrize("scale", [1.0, 3e-9, 1e15])
def test_nvfp4_quantises_as_defined(scale: float) -> None:
    weight = hard_weights(scale).view(2, 4, 64)
    weight[1, 2, :16] = 0
    weight[1, 3, :16] *= 1e-7  # its block scale rounds to zero
    q = quantise(weight, "nvfp4")
    assert q.scales is not None
    assert q.global_scale is not None
    codes, scales = unpack_nibbles(q.payload), q.scales.view(torch.uint8)
    for e in range(2):
        top = weight[e].abs().max()
        assert q.global_scale[e] == top / 2688
        whole = Fraction(q.global_scale[e].item())
        for row in range(4):
            for block in range(4):
                at = slice(block * 16, block * 16 + 16)
                part = [Fraction(v) for v in weight[e, row, at].tolist()]
                code = nearest(max(map(abs, part)) / (6 * whole), E4M3_POSITIVE)
                assert scales[e, row, block] == code
                step = E4M3_POSITIVE[code] * whole
                expected = [e2m1_code(v / step) if step else 0 for v in part]
                assert codes[e, row, at].tolist() == expected
    assert scales[1, 3, 0] == 0


@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (130, 200)])
def test_fp8_quantises_as_defined(shape: tuple[int, int]) -> None:
    rows, columns = shape
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(shape, generator=generator) * 10 ** torch.randn(shape, generator=generator)
    weight[128:, 128:] = 0
    q = quantise(weight, "fp8")
    assert q.scales is not None
    codes = q.payload.view(torch.uint8)
    assert tuple(q.scales.shape) == (-(-rows // 128), -(-columns // 128))
    for i in range(q.scales.shape[0]):
        for j in range(q.scales.shape[1]):
            part = weight[i * 128 : i * 128 + 128, j * 128 : j * 128 + 128]
            amax = part.abs().max()
            assert q.scales[i, j] == (amax / 448 if amax > 0 else 1)
    for r, c in torch.cartesian_prod(
        torch.arange(0, rows, 3), torch.arange(0, columns, 7)
    ).tolist():
        x = Fraction(weight[r, c].item()) / Fraction(q.scales[r // 128, c // 128].item())
        assert codes[r, c] & 127 == nearest(x, E4M3_POSITIVE)


def test_fp8_activations_are_scaled_by_row_and_128_columns() -> None:
    x = torch.randn(3, 200, generator=torch.Generator().manual_seed(2))
    x[1, :128] = 0
    codes, scales = quantise_activations(x)
    assert scales.shape == (3, 2)
    assert scales[1, 0] == 1
    assert torch.equal(scales[0, 1], x[0, 128:].abs().max() / 448)
    wide = scales.repeat_interleave(128, -1)[:, :200]
    assert (codes.float() * wide - x).abs().max() <= 2.0**-4 * x.abs().max()
    empty, none = quantise_activations(torch.empty(0, 200))
    assert empty.shape == (0, 200)
    assert none.shape == (0, 2)


@pytest.mark.parametrize("name", list(FORMATS))
def test_what_a_format_can_hold_comes_back_unchanged(name: str) -> None:
    weight = torch.randn(2, 48, 256, generator=torch.Generator().manual_seed(3))
    once = dequantise(quantise(weight, name))
    assert torch.equal(dequantise(quantise(once, name)), once)
    error = (once - weight).norm() / weight.norm()
    assert error < {"bf16": 3e-3, "fp8": 0.03, "mxfp4": 0.13, "nvfp4": 0.11}[name]
    bits = 8 * quantise(weight, name).nbytes / weight.numel()
    assert FORMATS[name].bits_per_weight <= bits < FORMATS[name].bits_per_weight + 0.01
    assert torch.equal(dequantise(quantise(torch.zeros(4, 64), name)), torch.zeros(4, 64))


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0, 8, 64), (3, 0, 64)])
def test_nothing_gives_nothing(name: str, shape: tuple[int, ...]) -> None:
    q = quantise(torch.empty(shape), name)
    assert q.payload.numel() == 0
    assert dequantise(q).shape == shape


@pytest.mark.parametrize("name", list(FORMATS))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_no_numbers_are_named(name: str, bad: float) -> None:
    weight = torch.ones(4, 64)
    weight[2, 5] = bad
    with pytest.raises(DSparkError, match=r"1 of 256 weights are NaN or infinite"):
        quantise(weight, name)


@pytest.mark.parametrize("name", ["fp8", "mxfp4", "nvfp4"])
def test_parts_of_other_weights_are_refused(name: str) -> None:
    q = quantise(torch.ones(4, 64), name)
    assert q.scales is not None
    for scales in (q.scales[:-1], q.scales.flatten(), q.scales.to(torch.bfloat16), None):
        with pytest.raises(DSparkError, match="scales are"):
            dequantise(replace(q, scales=scales))
    with pytest.raises(DSparkError, match="codes are"):
        dequantise(replace(q, payload=q.payload[..., :-1]))
    if name == "nvfp4":
        with pytest.raises(DSparkError, match="global scales are"):
            dequantise(replace(q, global_scale=torch.ones(2)))


def test_unknown_format_and_uneven_widths_are_named() -> None:
    with pytest.raises(DSparkError, match=r"'int3' is none of bf16, fp8, mxfp4, nvfp4"):
        quantise(torch.ones(2, 2), "int3")
    with pytest.raises(DSparkError, match="no multiple of the format's block of 32"):
        quantise(torch.ones(2, 48), "mxfp4")
    with pytest.raises(DSparkError, match="no multiple of the format's block of 16"):
        quantise(torch.ones(2, 24), "nvfp4")
    with pytest.raises(DSparkError, match="floating-point"):
        quantise(torch.ones(2, 64, dtype=torch.int8), "mxfp4")
