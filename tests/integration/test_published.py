"""Published drafters, converted and served: the reference engine's own steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dspark.evaluation.engine import DecodeSettings, ReferenceEngine
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.families.registry import open_drafter
from tests.integration import tiny_models
from tests.integration.conftest import all_verified
from tests.integration.serving import Served, ServerPool

TOKENS = 48

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("tiny-pair")]


PROMPTS = [[5 + (7 * i + j) % 200 for j in range(3 + 5 * i)] for i in range(8)]
LONG = [[5 + (7 * i + j * j) % 9000 for j in range(n)] for i, n in enumerate((40, 2300, 2900))]


def test_served_steps_are_the_engines(
    tiny_published: Served, noisy: tiny_models.TinyPair, published_drafter: Path
) -> None:
    """Prompts are longer and shorter than the window, alone and eight at a time."""
    check_steps(tiny_published, noisy.target, published_drafter, PROMPTS, (0, 1))
    assert "DSparkMoEModel" in tiny_published.log


def test_the_small_public_shape_is_served(pool: ServerPool, tmp_path: Path) -> None:
    """32,000 of 128,256 tokens, a window of 2,048, blocks of 8."""
    pair = tiny_models.build_public_shape(tmp_path)
    served = all_verified(pool, "public-shape", pair.target, pair.drafter)
    check_steps(served, pair.target, pair.drafter, LONG, (0, 1))
    pool.stop("public-shape")


def check_steps(
    served: Served, target: Path, drafter: Path, prompts: list[list[int]], layers: tuple[int, ...]
) -> None:
    """Greedy tokens of plain decoding, and as many steps and accepted drafts as the engine has."""
    model = TargetModel.load(target, layers)
    settings = DecodeSettings(max_new_tokens=TOKENS, batch=8)
    plain = ReferenceEngine(model, None, settings).run(prompts)
    drafted = ReferenceEngine(model, open_drafter(drafter, model), settings).run(prompts)
    fields = {"max_new_tokens": TOKENS, "sampling_params": {"ignore_eos": True}}
    alone = served.generate_all(prompts, 1, **fields)
    served.flush_cache()
    together = served.generate_all(prompts, 8, **fields)
    counts = []
    for reference, own, first, second in zip(plain, drafted, alone, together, strict=True):
        assert first["output_ids"] == second["output_ids"] == list(reference.tokens)
        accepted = sum(step.accepted for step in own.steps)
        counts.append(accepted)
        for answer in (first, second):
            assert answer["meta_info"]["spec_verify_ct"] == len(own.steps)
            assert answer["meta_info"]["spec_num_correct_drafts"] == accepted
    assert sum(counts) > 6 * len(prompts), "too few accepted drafts to tell anything"
