"""Experts over several ranks: every rank's parts together are the layer, and what has none."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sglang_dspark.backends.moe import expert_backends
from sglang_dspark.drafter.checkpoint import own_tensors
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.drafter.moe import MoE
from sglang_dspark.errors import DSparkError
from sglang_dspark.experts.backends import BACKENDS, ExpertWorkload
from sglang_dspark.experts.dispatch import Chooser, RoutedExperts
from sglang_dspark.experts.sharding import (
    RankMoE,
    Split,
    check_split,
    mlp_of_rank,
    tensors_of_rank,
)
from sglang_dspark.experts.times import TimesKey, measure
from sglang_dspark.quantisation.checkpoint import UNQUANTISED, quantise_tensors, restore_tensors
from sglang_dspark.quantisation.formats import FORMATS
from tests.drafter.helpers import tiny_config, tiny_drafter

SIZES = {
    "hidden_size": 64,
    "num_experts": 4,
    "experts_per_token": 3,
    "moe_intermediate_size": 512,
    "num_shared_experts": 2,
}
LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]  # tp, ep


def config(**changes: object) -> DrafterConfig:
    return tiny_config(**{**SIZES, **changes})


def splits(tp: int, ep: int) -> list[Split]:
    return [Split.of_rank(rank, tp, ep) for rank in range(tp)]


def test_neighbours_share_experts() -> None:
    found = [(s.experts.index, s.inner.index, s.joint.index) for s in splits(4, 2)]
    assert found == [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]
    with pytest.raises(DSparkError, match="--ep-size 3 does not divide --tp-size 4"):
        Split.of_rank(0, 4, 3)


@pytest.fixture(scope="module")
def file() -> dict[str, Tensor]:
    drafter = tiny_drafter(**SIZES, num_layers=1)
    return own_tensors(drafter, torch.float32)


@pytest.mark.parametrize(("tp", "ep"), LAYOUTS)
@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_rank_holds_its_part_of_the_very_values(
    file: dict[str, Tensor], form: str, tp: int, ep: int
) -> None:
    """Put together again, what the ranks restored is what the whole file restores to, bit for bit;
    everything but experts each of them has."""
    stored = file if form == UNQUANTISED else quantise_tensors(file, form)
    whole = restore_tensors(stored, form)
    ranks = [restore_tensors(tensors_of_rank(stored, s), form) for s in splits(tp, ep)]
    room = "layers.0.mlp."
    for name, expected in whole.items():
        parts = [rank[name] for rank in ranks]
        if not name.startswith(room) or "gate." in name:
            assert all(torch.equal(part, expected) for part in parts), name
            continue
        axis = -1 if "down" in name else -2
        assert sum(part.numel() for part in parts) == expected.numel(), name
        if name.startswith(room + "experts"):
            step = tp // ep
            parts = [torch.cat(parts[i : i + step], axis) for i in range(0, tp, step)]
            axis = 0
        assert torch.equal(torch.cat(parts, axis), expected), name


@pytest.mark.parametrize(("tp", "ep"), LAYOUTS)
@torch.no_grad()
def test_the_sum_over_ranks_is_the_layer(tp: int, ep: int) -> None:
    torch.manual_seed(0)
    c, x = config(), torch.randn(9, 64)
    layer, total = MoE(c).eval(), torch.zeros(9, 64)
    layer.gate.e_score_correction_bias.normal_(std=0.1)
    file = {f"layers.0.mlp.{name}": tensor for name, tensor in layer.state_dict().items()}
    for split in splits(tp, ep):
        rank = mlp_of_rank(c, split)
        assert isinstance(rank, RankMoE)
        assert rank.shared_experts is not None
        own = {k.removeprefix("layers.0.mlp."): t for k, t in tensors_of_rank(file, split).items()}
        rank.load_state_dict(own)
        routing = rank.route(x)
        given = (x, routing.experts, routing.weights)
        module = rank.routed(*given)
        weights = expert_backends.weights_of(rank.experts, c)
        for name in ("compiled", "torch"):
            made = BACKENDS[name].ready(weights, workload(rank, c))(*given)
            torch.testing.assert_close(made, module, atol=1e-5, rtol=1e-4)
        total += module + rank.shared_experts(x)
    torch.testing.assert_close(total, layer(x), atol=1e-5, rtol=1e-4)


def workload(rank: RankMoE, c: DrafterConfig) -> ExpertWorkload:
    held, inner, width = rank.experts.gate_proj.shape
    return ExpertWorkload("cpu", "bf16", held, inner, width, 3, absent=c.num_experts - held)


@torch.no_grad()
def test_tokens_whose_experts_are_all_elsewhere_are_zero() -> None:
    c = config(experts_per_token=1)
    rank = RankMoE(c, Split.of_rank(1, 2, 2))
    weights = expert_backends.weights_of(rank.experts, c)
    call = RoutedExperts(weights, Chooser(ExpertWorkload("cpu", "bf16", 2, 512, 64, 1, absent=2)))
    x, own = torch.randn(3, 64), torch.ones(3, 1)
    found = call(x, torch.tensor([[-1], [1], [-1]]), own)
    assert not found[[0, 2]].any()
    assert found[1].any()
    assert not call(x, torch.full((3, 1), -1), own).any()


@torch.no_grad()
def test_times_are_of_the_pairs_that_are_here() -> None:
    c = config()
    rank = RankMoE(c, Split.of_rank(1, 2, 2))
    here = workload(rank, c)
    key = TimesKey.of(here, "here", "")
    assert key.shape == "2 experts of 64 x 512, top 3, 2 elsewhere"
    table = measure(expert_backends.weights_of(rank.experts, c), here, key, (8,), repeats=1)
    assert {timing.backend for timing in table.timings} == {"compiled", "torch"}
    assert not table.unfit


def test_what_looks_ids_up_on_the_host_is_no_part_of_a_graph() -> None:
    fields = {"device": "cuda", "capability": (9, 0), "format": "bf16", "absent": 4}
    captured = ExpertWorkload(**fields, graph=True)
    assert "on the host" in (BACKENDS["flashinfer"].why_not(captured) or "")
    assert BACKENDS["triton"].refusal(captured) is None
    assert BACKENDS["triton"].skips
    many = ExpertWorkload("cpu", "bf16", tokens=200, top_k=2, absent=8)
    assert BACKENDS["compiled"].why_not(many) == "for up to 256 tokens"


@pytest.mark.parametrize(
    ("changes", "tp", "ep", "message"),
    [
        ({"num_experts": 6}, 4, 4, "--ep-size 4 does not divide its 6 experts; choose one of 1, 2"),
        ({"num_heads": 6}, 4, 1, "--tp-size 4 does not divide its 6 query and 2 key heads"),
        ({"moe_intermediate_size": 510}, 4, 1, "its experts' width 510 has no 4 equal parts"),
        (
            {"expert_format": "fp8", "moe_intermediate_size": 384},
            2, 1,
            "its experts' width 384, in blocks of 128, has no 2 equal parts; choose --tp-size over "
            "--ep-size of 1, 3",
        ),
        ({"expert_format": "mxfp4", "moe_intermediate_size": 96}, 2, 1, "in blocks of 32, has no"),
        ({"expert_format": "nvfp4", "moe_intermediate_size": 48}, 2, 1, "in blocks of 16, has no"),
        (
            {"expert_format": "fp8", "moe_intermediate_size": 128, "num_shared_experts": 1},
            2, 2,
            "its shared experts' width 128, in blocks of 128, has no 2 equal parts; choose "
            "--tp-size of 1",
        ),
        ({"expert_format": "fp8", "moe_intermediate_size": 576}, 2, 1, "--ep-size of 1$"),
        ({"num_experts": 0, "window": 4, "intermediate_size": 49}, 2, 1, "its MLP's width 49 has"),
    ],
)  # fmt: skip
def test_what_has_no_equal_parts_is_named(
    changes: dict[str, object], tp: int, ep: int, message: str
) -> None:
    with pytest.raises(
        DSparkError, match=f"drafter d cannot be split over {tp} ranks: .*{message}"
    ):
        check_split(config(**changes), Split.of_rank(0, tp, ep), "drafter d")


@pytest.mark.parametrize(
    ("changes", "tp", "ep"),
    [
        ({"expert_format": "fp8", "moe_intermediate_size": 512}, 4, 2),
        ({"expert_format": "fp8", "moe_intermediate_size": 192}, 1, 1),
        ({"expert_format": "fp8", "moe_intermediate_size": 192, "num_shared_experts": 0}, 2, 2),
        ({"expert_format": "mxfp4"}, 4, 1),
        ({"num_heads": 8, "num_kv_heads": 2}, 4, 4),
    ],
)
def test_what_has_equal_parts_passes(changes: dict[str, object], tp: int, ep: int) -> None:
    check_split(config(**changes), Split.of_rank(0, tp, ep), "drafter d")


def test_an_uneven_tensor_is_named() -> None:
    uneven, split = {"layers.3.mlp.experts.up_proj": torch.zeros(4, 5, 8)}, Split.of_rank(0, 2, 1)
    with pytest.raises(DSparkError, match=r"layers.3.mlp.experts.up_proj: \(4, 5, 8\) has no 2"):
        tensors_of_rank(uneven, split)
