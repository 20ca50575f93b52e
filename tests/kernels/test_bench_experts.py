"""The benchmark of the experts' kernels: its plan, its arithmetic, and what it says here."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from sglang_dspark.benchmarks.experts import Matrix, plan
from sglang_dspark.benchmarks.grouped_shapes import random_weights
from sglang_dspark.benchmarks.layers import LAYERS, NOMINAL_H100, Layer, routing, work
from sglang_dspark.benchmarks.peers import LAYER_PEERS, PRODUCT_PEERS, Case
from sglang_dspark.cli.bench import app
from tests.kernels.processes import output_of

SMALL = Layer("small", 256, 128, 16, 2)


def test_work_by_hand() -> None:
    ids = torch.tensor([[0, 1], [1, 5]])
    found = work(SMALL, ids, "mxfp4")
    assert found.active == 3
    assert found.operations == 2 * 4 * 3 * 256 * 128
    rows = 4 * (256 + 2 * 128 + 256) * 2  # in and out of both products, BF16
    assert found.traffic == 3 * 3 * 256 * 128 * 4.25 / 8 + rows
    assert found.bound(NOMINAL_H100, False) == "bandwidth"
    assert found.least_us(NOMINAL_H100, False) == pytest.approx(found.traffic / 3.35e6)


def test_routings_are_of_distinct_experts_and_skewed_ones_crowd() -> None:
    layer = LAYERS[0]
    uniform, skewed = (routing(layer, 512, kind) for kind in ("uniform", "skewed"))
    for ids in (uniform, skewed):
        assert ids.shape == (512, 6)
        assert all(len(set(row)) == 6 for row in ids.tolist())
    top = [int(torch.bincount(ids.flatten()).max()) for ids in (uniform, skewed)]
    assert top[1] > 5 * top[0]


def test_plan_turns_from_bandwidth_to_compute() -> None:
    rows = [row for row in plan(Matrix(tokens=(1, 4096))) if row["layer"] == "Qwen3-30B-A3B"]
    assert {row["bound"] for row in rows if row["tokens"] == 1} == {"bandwidth"}
    assert "compute" in {row["bound"] for row in rows if row["format"] == "mxfp4"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so only without a CUDA device")
def test_without_a_device_it_compares_plans_and_says_so() -> None:
    first, second, *rest = output_of("sglang_dspark.benchmarks.experts").splitlines()
    assert "nothing is measured" in first
    diffs = json.loads(second)["calc_diff"]
    assert len(diffs) == 7
    assert max(diffs.values()) <= 1e-3
    assert all("ours_us" not in json.loads(line) for line in rest)


def test_counts_of_tokens_are_read() -> None:
    done = CliRunner().invoke(app, ["experts", "--tokens", "1,x"])
    assert done.exit_code != 0
    assert "not a list of positive numbers" in str(done.exception)


@pytest.mark.parametrize("peer", [*LAYER_PEERS.values(), *PRODUCT_PEERS.values()])
def test_a_peer_without_the_format_says_so(peer) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = random_weights(generator, "mxfp4", (4, 64, 64))
    ids = torch.zeros(2, 1, dtype=torch.int64)
    case = Case("bf16 x mxfp4", torch.ones(2, 64).bfloat16(), ids, torch.ones(2, 1), *[weights] * 2)
    with pytest.raises(ValueError, match="has no bf16 x mxfp4"):
        peer(case)
