"""The draft steps of a GPU: the operator where Triton runs, else SGLang's, the same drafts."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dspark.backends.cuda.draft import DraftSteps
from tests.kernels.processes import output_of


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        output_of("tests.backends.cuda.interpreted_markov").splitlines()[-1]
    )
    return found


def test_the_operator_drafts_the_blocks_of_sglang(report: dict[str, Any]) -> None:
    """Every head, two types; all argmax, and sampled beside greedy requests, in a graph or not. A
    vanilla head's blocks in a graph are SGLang's. So are those over a reduced vocabulary."""
    assert len(report["different"]) == 15
    assert not any(report["different"].values()), report["different"]


def test_a_captured_launch_keeps_its_counters(report: dict[str, Any]) -> None:
    assert report["stays"]


def test_what_the_operator_refuses_is_sglangs_and_said_once(report: dict[str, Any]) -> None:
    assert report["upstream"] == 9  # four refusals twice, and a server that is not scheduled
    assert [line.partition("one launch: ")[2] for line in report["told"]] == [
        "its head is __main__.Other, not VanillaMarkov or GatedMarkovHead or RNNHead",
        "the vocabulary is split over ranks",
        "ranks agree on each draft before the next",
        "markov: w2 must be [204, 16] float32, found [203, 16] float32",
    ]


def test_a_launch_that_does_not_fit_is_sglangs_from_then_on(report: dict[str, Any]) -> None:
    """Not taken for a failed device, which would end the server; other errors still are."""
    found = report["too large"]
    assert found["launches"] == 1
    assert found["same"]
    (line,) = found["told"]
    assert "does not fit this process's part of the GPU" in line
    assert found["other"].endswith("an illegal memory access")


def test_without_triton_sglang_drafts() -> None:
    """A CPU has no Triton unless interpreted; nothing but the device is looked at."""
    given = {"base_logits": torch.zeros(1, 2, 3)}
    assert DraftSteps()(lambda **block: ("by", block), **given) == ("by", given)
