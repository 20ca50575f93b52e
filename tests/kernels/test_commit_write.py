"""Writing of accepted rows by Triton: its torch reference on odd shapes, a row known by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from sglang_dspark.benchmarks.commit_write_shapes import MOST, cases, copied, difference
from sglang_dspark.kernels.commit_write import DraftLayers, why_not, write_torch, write_triton
from tests.kernels.processes import output_of

# One process: the module computes its results once, slowly.
pytestmark = pytest.mark.xdist_group("commit-write")

FEW, MANY = 40, 2000  # launches


@pytest.fixture(scope="module", params=[FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def interpreted(request: pytest.FixtureRequest) -> dict[str, Any]:
    printed = output_of("tests.kernels.interpreted_commit_write", str(request.param))
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return {**found, "launches": request.param}


def test_interpreted_kernel_equals_torch(interpreted: dict[str, Any]) -> None:
    assert interpreted["wrong"] == []
    assert interpreted["rows"] >= 3 * interpreted["launches"]
    assert interpreted["left"] >= 2.5 * interpreted["launches"]
    assert set(interpreted["worst"]) == {"float32", "bfloat16", "float16", "float8_e4m3fn"}


def test_the_benchmark_compares_the_same_work(interpreted: dict[str, Any]) -> None:
    """Its two ways leave the same caches, but for SGLang's rounding before the rotation."""
    assert 0 < interpreted["peers"]["off"] < 2**-6
    assert interpreted["peers"]["peer"] == interpreted["peers"]["emitted"]
    assert interpreted["peers"]["ours"] == interpreted["peers"]["rows"]
    assert interpreted["peers"]["rows"] > interpreted["peers"]["emitted"]


def layers_by_hand(**changed: Any) -> DraftLayers:
    """One layer of one head of four."""
    made = DraftLayers(
        keys=[torch.zeros(3, 1, 4)],
        values=[torch.zeros(3, 1, 4)],
        norms=torch.tensor([[1.0, 2.0, 1.0, 1.0]]),
        scales=torch.tensor([[1.0, 2.0]]),
        epsilon=0.0,
    )
    return replace(made, **changed)


def test_a_row_known_by_hand() -> None:
    quarter = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]])  # by 0, by 90 degrees
    key, value = [2.0, 2.0, -2.0, 2.0], [2.0, 4.0, 6.0, 8.0]  # root of the mean square: 2
    rows = torch.tensor([key + value, key + value, [torch.nan] * 8])
    positions, slots = torch.tensor([0, 1, 1]), torch.tensor([2, 1, 0])
    layers = layers_by_hand()
    write_torch(layers, rows, quarter, positions, slots)
    assert layers.keys[0][:, 0].tolist() == [[0, 0, 0, 0], [1, -1, 1, 2], [1, 2, -1, 1]]
    assert layers.values[0][:, 0].tolist() == [[0, 0, 0, 0], [1, 2, 3, 4], [1, 2, 3, 4]]
    layers = layers_by_hand(neox=False)
    write_torch(layers, rows, quarter, positions, slots)
    assert layers.keys[0][1, 0].tolist() == [-2, 1, -1, -1]


def test_kernel_compiles_without_a_device() -> None:
    report = json.loads(output_of("tests.kernels.compiled_commit_write"))
    assert {name.split(":")[0] for name in report} == {"80", "90", "100"}
    assert all(each["code"] > 0 for each in report.values())
    assert max(each["shared"] for each in report.values()) <= 48 * 1024


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_kernel_equals_torch() -> None:
    for given in cases(FEW, device="cuda"):
        if why_not(given.layers, given.cos_sin.shape[1]) is None:
            expected = copied(given)
            write_triton(*given)
            write_torch(*expected)
            assert difference(given, expected) <= MOST


def test_what_is_refused() -> None:
    assert why_not(layers_by_hand(), 4) is None
    assert why_not(layers_by_hand(), 2) is None
    for rotary in (0, 3, 6):
        assert why_not(layers_by_hand(), rotary) == f"{rotary} of 4 numbers of a key are rotated"
    doubles = [torch.zeros(3, 1, 4).double()]
    assert why_not(layers_by_hand(keys=doubles), 4) == "its cache holds torch.float64"
    for values in (torch.zeros(3, 1, 8), torch.zeros(3, 2, 4), torch.zeros(3, 1, 4).half()):
        said = why_not(layers_by_hand(values=[values]), 4)
        assert said == "its layers have caches of unlike rows"
    apart = torch.zeros(3, 1, 8)[..., ::2]
    assert (
        why_not(layers_by_hand(keys=[apart]), 4) == "a token's row of its cache is not contiguous"
    )


def test_mistakes_are_named() -> None:
    layers, cos_sin = layers_by_hand(), torch.ones(2, 4)
    rows, positions, slots = torch.ones(2, 8), torch.tensor([0, 1]), torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"projected must be \[N, 8\]"):
        write_torch(layers, rows[:, 1:], cos_sin, positions, slots)
    with pytest.raises(ValueError, match=r"positions must be \[2\] int64"):
        write_triton(layers, rows, cos_sin, positions.int(), slots)
    with pytest.raises(ValueError, match=r"slots must be \[2\] int64"):
        write_torch(layers, rows, cos_sin, positions, slots[:1])
    with pytest.raises(ValueError, match=r"cos_sin must be \[longest, rotary\]"):
        write_torch(layers, rows, cos_sin[0], positions, slots)
    with pytest.raises(ValueError, match="need norms and scales for each"):
        write_torch(layers_by_hand(scales=torch.ones(2)), rows, cos_sin, positions, slots)
