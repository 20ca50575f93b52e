"""A drafter with experts on two ranks, over SGLang's own groups, against the same on one rank."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("sglang")

from safetensors.torch import load_file
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from sglang_dspark.backends.moe.moe_config import DSparkMoEConfig
from sglang_dspark.backends.moe.moe_model import DSparkMoEModel, split_here
from sglang_dspark.errors import DSparkError
from tests.backends.cpu import moe_ranks
from tests.drafter.helpers import tiny_config

# One process: the module computes its results once, slowly.
pytestmark = pytest.mark.xdist_group("moe-ranks")

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Tensor]]:
    """Run both ranks and return the tensors that each wrote."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.backends.cpu.moe_ranks"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(folder)], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            _, errors = rank.communicate(timeout=600)
            assert rank.returncode == 0, errors[-2000:]
    finally:
        for rank in ranks:
            rank.kill()
    return [load_file(folder / f"{rank}.safetensors") for rank in range(2)]


@pytest.mark.parametrize("layout", ["tp", "ep"])
@pytest.mark.parametrize("shape", list(moe_ranks.SHAPES))
def test_two_ranks_draft_what_one_does(
    found: list[dict[str, Tensor]], shape: str, layout: str
) -> None:
    """Hidden states and base logits of draft blocks, in every format of experts.

    To rounding: which sums the compiler reassociates may differ by process. That a difference of
    that size cannot part the ranks is upstream's business (`SpecTpSync` sends rank 0's drafts).
    """
    for part in ("hidden", "logits"):
        alone = found[0][f"alone {shape} {part}"]
        for rank in found:
            torch.testing.assert_close(
                rank[f"{layout} {shape} {part}"], alone, atol=2e-5, rtol=1e-5
            )
    first, second = (rank[f"{layout} {shape} logits"].argmax(-1) for rank in found)
    assert torch.equal(first, second), "the ranks would draft different tokens"


def test_experts_are_held_in_parts(found: list[dict[str, Tensor]]) -> None:
    shapes = {layout: found[1][f"{layout} shape"].tolist() for layout in moe_ranks.LAYOUTS}
    assert shapes == {"alone": [4, 256, 64], "tp": [4, 128, 64], "ep": [2, 256, 64]}


def test_what_cannot_be_split_is_named_before_anything_is_built() -> None:
    config = DSparkMoEConfig(**tiny_config(**moe_ranks.EXPERTS | {"num_experts": 3}).to_json())
    ranks = {f"{name}_rank": 0 for name in ("tp", "moe_ep", "moe_tp")}
    two = {"tp_size": 2, "attn_tp_size": 2, "attn_dp_size": 1, "attn_cp_size": 1, "moe_dp_size": 1}
    with (
        get_parallel().override(**two, **ranks, moe_ep_size=2, moe_tp_size=1),
        pytest.raises(DSparkError, match="--ep-size 2 does not divide its 3 experts"),
    ):
        DSparkMoEModel(config)
    beside = two | {"moe_dp_size": 2}
    with (
        get_parallel().override(**beside, **ranks, moe_ep_size=1, moe_tp_size=1),
        pytest.raises(DSparkError, match="use --moe-dp-size 1"),
    ):
        split_here()
