"""Attention of verify windows by Triton: its torch reference on odd shapes, a row known by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from math import exp, log
from typing import Any

import pytest
import torch

from sglang_dspark.benchmarks.window_shapes import (
    MOST,
    UNWRITTEN,
    Attention,
    attention,
    cases,
    difference,
)
from sglang_dspark.kernels.window_attention import attend_torch, attend_triton
from sglang_dspark.kernels.window_inputs import Context, Rule, Windows, why_not
from sglang_dspark.kernels.window_tiling import window_tiling
from tests.kernels.processes import EVERY, output_of

pytestmark = pytest.mark.xdist_group("window-attention")

FEW, MANY = 16, 560  # passes, of 3.6 windows on average


@pytest.fixture(scope="module", params=[FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def interpreted(request: pytest.FixtureRequest) -> dict[str, Any]:
    printed = output_of("tests.kernels.interpreted_windows", str(request.param))
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return {**found, "passes": request.param}


def test_interpreted_kernel_equals_torch(interpreted: dict[str, Any]) -> None:
    assert interpreted["wrong"] == []
    assert set(interpreted["worst"]) == {"float32", "bfloat16", "float16"}
    assert interpreted["merged"] >= interpreted["passes"] // 3
    assert interpreted["blocks"] > 1


def test_the_benchmark_compares_the_same_work(interpreted: dict[str, Any]) -> None:
    """SGLang's kernel on the benchmark's pass, in float32."""
    assert interpreted["peer"] <= MOST[torch.float32]
    assert interpreted["slots"] > interpreted["windows"]


def by_hand(**rule: Any) -> Attention:
    """Two tokens in slots 2 and 1, a window of two rows and one row of padding; one head of one.

    Scores are zero but for the second cached token, whose key is log 2. Values are 1, 2, 4, 8.
    """
    queries = torch.ones(3, 1, 1)
    keys, values = torch.zeros(3, 1, 1), torch.tensor([4.0, 8.0, 64.0]).view(3, 1, 1)
    windows = Windows(queries, keys, values, torch.tensor([0, 0, 3]), longest=2)
    context = Context(
        torch.tensor([torch.nan, log(2), 0.0]).view(3, 1, 1),
        torch.tensor([torch.nan, 2.0, 1.0]).view(3, 1, 1),
        torch.tensor([0, 1, 3]),
        torch.tensor([0, 2, 1]),
    )
    return Attention(windows, context, Rule(1.0, **rule))


@pytest.mark.parametrize(
    ("rule", "first", "second"),
    [
        ({}, (1 + 2 * 2 + 4) / 4, (1 + 2 * 2 + 4 + 8) / 5),
        ({"causal": False}, (1 + 2 * 2 + 4 + 8) / 5, (1 + 2 * 2 + 4 + 8) / 5),
        ({"sliding": 1}, (2 * 2 + 4) / 3, (4 + 8) / 2),
        ({"sliding": 0}, 4.0, 8.0),
        ({"sliding": 0, "causal": False}, 4.0, 8.0),
        ({"sinks": torch.tensor([log(3)])}, (1 + 2 * 2 + 4) / 7, (1 + 2 * 2 + 4 + 8) / 8),
        (
            {"logit_cap": 0.5},
            (1 + 2 * exp(0.5 * 0.8824) + 4) / (2 + exp(0.5 * 0.8824)),
            (1 + 2 * exp(0.5 * 0.8824) + 4 + 8) / (3 + exp(0.5 * 0.8824)),
        ),
    ],
)
def test_rows_known_by_hand(rule: dict[str, Any], first: float, second: float) -> None:
    out = by_hand(**rule).expected().flatten().tolist()
    assert out == pytest.approx([first, second, 0.0], abs=1e-4)


def test_scales_are_those_of_the_cache_alone() -> None:
    made = by_hand()
    scaled = replace(made.context, key_scale=0.0, value_scale=2.0)
    out = made._replace(context=scaled).expected().flatten().tolist()
    assert out[0] == pytest.approx((2 * 1 + 2 * 2 + 4) / 3)


def test_rows_of_no_window_are_not_written() -> None:
    made = attention(
        torch.Generator(), [2, 0, 3], [5, 0, 9], 3, (2, 1, 8, 8), torch.float32, torch.float32
    )
    fewer = replace(made.windows, starts=torch.tensor([0, 2, 2, 4]))
    out = made._replace(windows=fewer).expected()
    assert (out[4:] == UNWRITTEN).all()
    assert (out[:4] != UNWRITTEN).all()


def test_splits_follow_slots_and_processors() -> None:
    def splits(slots: int, longest: int = 8) -> int:
        return window_tiling(slots, 8, 4, longest, 128, 132, (9, 0)).splits

    assert [splits(slots) for slots in (1, 8, 64, 128, 512)] == [32, 16, 2, 1, 1]
    assert splits(64, longest=32) == 1  # two tiles of 64 pairs


@pytest.mark.parametrize(
    ("group", "longest", "rows", "blocks"),
    [(1, 1, 16, 1), (4, 8, 32, 1), (8, 8, 64, 1), (16, 8, 64, 2), (71, 8, 64, 9), (3, 7, 32, 1)],
)
def test_tiles_hold_all_pairs(group: int, longest: int, rows: int, blocks: int) -> None:
    tiling = window_tiling(4, 2, group, longest, 128, 132, (9, 0))
    assert (tiling.rows, tiling.blocks) == (rows, blocks)


@EVERY
def test_kernels_compile_without_a_device(every: tuple[str, ...]) -> None:
    report = json.loads(output_of("tests.kernels.compiled_windows", *every))
    assert {name.split(":")[0] for name in report} == (
        {"80", "86", "89", "90", "100", "120"} if every else {"89", "90", "100"}
    )
    assert sum("merge" in each for each in report.values()) >= (6 if every else 1)
    for name, each in report.items():
        memory = 99 if name.startswith(("86", "89", "120")) else 160  # KiB of a program
        assert each["window"]["shared"] <= memory * 1024, name
        assert each["window"]["stack"] <= 128, name  # float32 spills a little
        assert each["window"]["prefetched"] > 0, name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_kernel_equals_torch() -> None:
    for made in cases(FEW, device="cuda"):
        if why_not(made.windows, made.context) is None:
            found = made.output()
            attend_triton(*made, found)
            assert difference(found, made.expected()) <= MOST[found.dtype]


def test_what_is_not_supported() -> None:
    made = by_hand()
    assert why_not(made.windows, made.context) is None
    wide = replace(made.windows, queries=torch.ones(3, 1, 257))
    assert why_not(wide, made.context) == "heads of 257 numbers, more than 256"
    mixed = replace(made.windows, keys=made.windows.keys.half())
    assert why_not(mixed, made.context) == "rows of torch.float32, torch.float16 and torch.float32"
    bytes_ = replace(made.context, keys=made.context.keys.to(torch.uint8))
    assert why_not(made.windows, bytes_) == "a cache of torch.uint8 and torch.float32"
    paged = replace(made.context, keys=made.context.keys[None])
    assert why_not(made.windows, paged) == "a cache [1, 3, 1, 1] of 1 heads of 1"
    apart = replace(made.context, values=torch.ones(3, 1, 2)[..., ::2])
    assert why_not(made.windows, apart) == "a cache [3, 1, 1] of 1 heads of 1"


def test_mistakes_are_named() -> None:
    windows, context, rule = by_hand()
    out = torch.empty(3, 1, 1)
    with pytest.raises(ValueError, match=r"out must be \[3, 1, 1\]"):
        attend_torch(windows, context, rule, out[1:])
    with pytest.raises(ValueError, match=r"need keys \[3, KV, 1\]"):
        attend_triton(replace(windows, keys=windows.keys[1:]), context, rule, out)
    with pytest.raises(ValueError, match=r"a cache \[3, 2, 1\] of 1 heads of 1"):
        attend_torch(windows, replace(context, keys=torch.ones(3, 2, 1)), rule, out)
    with pytest.raises(ValueError, match="3 starts of windows of at most 2 rows, 2 of contexts"):
        attend_torch(windows, replace(context, starts=context.starts[1:]), rule, out)
    with pytest.raises(ValueError, match=r"sinks must be \[1\]"):
        attend_torch(windows, context, replace(rule, sinks=torch.ones(2)), out)
    apart = replace(windows, keys=torch.ones(3, 1, 2)[..., ::2], queries=torch.ones(3, 1, 1))
    with pytest.raises(ValueError, match="must be contiguous"):
        attend_torch(apart, context, rule, out)
