"""Weights kept in bfloat16 or int8, served: DSPARK still gives what plain decoding gives.

Packed weights stand for float32 numbers; the distribution to follow is that of these numbers.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_dspark.backends.cpu.weight_formats import FORMATS, dense, pack
from tests.integration.prompts import LONG, PROMPTS
from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool
from tests.integration.test_greedy_equal import check_equal
from tests.integration.test_sampled_distribution import check_distribution
from tests.integration.tiny_models import TinyPair

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("packed-weights")]


def start(
    pool: ServerPool,
    form: str,
    name: str,
    target: Path,
    drafter: Path | None,
    *,
    mode: str,
    activations: str = "auto",
) -> Served:
    config = pool.folder / f"{name}-{form}.json"
    cpu = {"weights": form, "activations": activations}
    config.write_text(json.dumps({"cpu": cpu, "schedule": {"mode": mode}}))
    flags = () if drafter is None else (*DSPARK_FLAGS, str(drafter))
    slots = ("--max-running-requests", "16", "--dspark-config", str(config))
    return pool.start(f"{name}-{form}", target, *flags, *slots)


@pytest.mark.parametrize(
    ("form", "activations"),
    [
        ("int8", "auto"),
        pytest.param("int8", "narrow", marks=pytest.mark.slow),
        pytest.param("bfloat16", "narrow", marks=pytest.mark.slow),
    ],
)
def test_greedy_tokens_are_the_plain_servers_of_the_same_weights(
    pool: ServerPool,
    demo_target: Path,
    demo_drafter: Path,
    form: str,
    activations: str,
) -> None:
    """Rows of eight bits (`narrow` beside int8) magnify last bits to whole steps, so this asks that
    neither drafts nor company change one bit: four users, or all at once."""
    told = {"activations": activations}
    names = (f"{name}-{activations}" for name in ("plain", "static"))
    plain = start(pool, form, next(names), demo_target, None, mode="auto", **told)
    drafting = start(pool, form, next(names), demo_target, demo_drafter, mode="static", **told)
    for server in (plain, drafting):
        assert f"weights of LlamaForCausalLM are kept as {form}" in server.log
        assert "sglang-dspark: off:" not in server.log
    prompts = (*PROMPTS[:14], *LONG)
    assert check_equal(plain, drafting, 4, prompts, 32, plain_users=len(prompts)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("form", ["int8", "bfloat16"])
def test_sampled_tokens_follow_the_rounded_target(
    pool: ServerPool, noisy: TinyPair, form: str
) -> None:
    """Its table is known exactly: that of the numbers which the packed weights stand for, rows
    being as they are (beside int8 but for their sixteen bits)."""
    weights = load_file(noisy.target / "model.safetensors")
    embedding, head = (
        _rounded(weights[name], form) for name in ("model.embed_tokens.weight", "lm_head.weight")
    )
    normed = torch.nn.functional.rms_norm(
        embedding, embedding.shape[1:], weights["model.norm.weight"], 1e-6
    )
    rounded = replace(noisy, logits=normed @ head.T)
    assert not torch.equal(rounded.logits, noisy.logits)
    served = start(
        pool, form, "tiny", noisy.target, noisy.drafter, mode="static", activations="wide"
    )
    check_distribution(served, rounded, 256)


def _rounded(weight: torch.Tensor, form: str) -> torch.Tensor:
    """Return the values that a packed weight with any number of rows represents."""
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % 16))
    return dense(pack(padded, FORMATS[form]))[: len(weight)].clone()
