"""Training a drafter with experts on the tiny target: where it starts, that it learns, resumes
exactly with its routers' biases, and decodes losslessly in the reference engine."""

from __future__ import annotations

import pytest
import torch
from pydantic import TypeAdapter

from sglang_dspark.drafter.moe import MoE, Router
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.engine import DecodeSettings, ReferenceEngine
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.families.dspark.initial import drafter_config
from sglang_dspark.families.dspark.shape import MoEShape
from sglang_dspark.families.learning.upcycling import split_mlp
from sglang_dspark.families.registry import drafter_kind, open_drafter
from sglang_dspark.training.config import DrafterShape, RunConfig
from sglang_dspark.training.setup import prepare
from tests.drafter.helpers import tiny_config
from tests.training.test_run import _same_files


def _moe(config: RunConfig, path, **changes) -> RunConfig:
    raw = config.drafter.model_dump() | {"kind": "moe", "experts": 4, "window": 12} | changes
    shape = TypeAdapter(DrafterShape).validate_python(raw)
    return config.model_copy(update={"run_dir": path, "drafter": shape})


def _biases(module: torch.nn.Module) -> list[torch.Tensor]:
    return [m.e_score_correction_bias.clone() for m in module.modules() if isinstance(m, Router)]


@pytest.fixture(scope="module")
def trained(config, tmp_path_factory):
    """A run of 40 steps in one go, and its reports by step."""
    cfg, reports = _moe(config, tmp_path_factory.mktemp("moe") / "whole"), {}
    trainer, _ = prepare(cfg)
    trainer.run(lambda step, means: reports.update({step: means}))
    return cfg, trainer, reports


def test_it_learns_and_its_experts_are_balanced(trained) -> None:
    _, trainer, reports = trained
    assert reports[40]["loss"] < 0.9 * reports[10]["loss"]
    assert reports[40]["held_out_tau"] > 1
    for bias in _biases(trainer.learner.module):
        assert bias.abs().max() > 1e-3
        assert bias.abs().max() < 40.5 * 1e-3  # one step of the rate per training step


def test_resume_is_exact(trained, tmp_path) -> None:
    cfg, _, reports = trained
    part = cfg.model_copy(update={"run_dir": tmp_path / "part"})
    first, _ = prepare(part)
    for _ in range(20):
        first.train_step()
    first.save()
    second, note = prepare(part)
    assert "step 20" in note
    for bias, kept in zip(
        _biases(second.learner.module), _biases(first.learner.module), strict=True
    ):
        assert bias.any()
        assert torch.equal(bias, kept)
    again = {}
    second.run(lambda step, means: again.update({step: means}))
    assert again[40]["loss"] == reports[40]["loss"]
    assert again[40]["held_out_loss"] == reports[40]["held_out_loss"]
    for name in ("drafter/model.safetensors", "state.safetensors"):
        _same_files(cfg.run_dir / name, tmp_path / "part" / name)


def test_held_out_sequences_do_not_count_as_load(trained) -> None:
    _, trainer, _ = trained
    trainer.validate()
    routers = [m for m in trainer.learner.module.modules() if isinstance(m, Router)]
    assert routers
    assert not any(m.load.any() for m in routers)


def test_the_engine_decodes_greedily_as_the_target_does(trained) -> None:
    cfg, _, _ = trained
    folder = cfg.run_dir / "drafter"
    assert drafter_kind(folder) == "dspark"
    target = TargetModel.load(cfg.data.target, cfg.drafter.target_layer_ids)
    drafter = open_drafter(folder, target)
    assert drafter.config.num_experts == 4
    prompts = [[0, 4 + i, 20 + i, 2, 1] for i in range(6)]
    settings = DecodeSettings(max_new_tokens=40, batch=4)
    plain = ReferenceEngine(target, None, settings).run(prompts)
    drafted = ReferenceEngine(target, drafter, settings).run(prompts)
    assert [g.tokens for g in drafted] == [g.tokens for g in plain]
    steps = [step for g in drafted for step in g.steps]
    assert {0} < {step.accepted for step in steps}, "neither only rejections nor only accepts"


def test_it_starts_as_the_targets_mlp() -> None:
    """For any router choice, every group of experts is the same function."""
    torch.manual_seed(0)
    width = {"num_experts": 8, "experts_per_token": 2, "moe_intermediate_size": 16}
    moe = MoE(tiny_config(**width, num_shared_experts=1, routed_scaling=2.0))
    gate, up, down = torch.randn(48, 32), torch.randn(48, 32), torch.randn(32, 48)
    assert split_mlp(moe, gate, up, down)
    x = torch.randn(50, 32)
    expected = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(moe(x), expected, atol=1e-3, rtol=1e-4)
    assert len(moe.gate(x).experts.unique()) == 8
    assert not torch.equal(moe.experts.gate_proj[0], moe.experts.gate_proj[2])


@pytest.mark.parametrize(
    "changes",
    [
        {"num_experts": 3},
        {"moe_intermediate_size": 24},
        {"normalise_weights": False},
        {"routed_scaling": 1.0},
    ],
)
def test_experts_that_are_no_parts_of_it_start_on_their_own(changes) -> None:
    fields = {"num_experts": 8, "experts_per_token": 2, "moe_intermediate_size": 16}
    fields |= {"num_shared_experts": 1, "routed_scaling": 2.0, **changes}
    moe = MoE(tiny_config(**fields))
    before = moe.experts.gate_proj.detach().clone()
    assert not split_mlp(moe, torch.randn(48, 32), torch.randn(48, 32), torch.randn(32, 48))
    assert torch.equal(moe.experts.gate_proj, before)


def test_active_parameters_are_the_dense_drafters(config) -> None:
    target = TargetModel.load(config.data.target).config
    shape = MoEShape.model_validate(config.drafter.model_dump() | {"kind": "moe"})
    made = drafter_config(shape, target)
    assert 3 * made.moe_intermediate_size == made.intermediate_size == target.intermediate_size
    odd = shape.model_copy(update={"experts_per_token": 4})
    with pytest.raises(DSparkError, match=r"set drafter\.expert_width"):
        drafter_config(odd, target)
    assert drafter_config(odd.model_copy(update={"expert_width": 7}), target).num_experts == 8
