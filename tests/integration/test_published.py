"""A published drafter, converted and served: the reference engine's own steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dspark.evaluation.engine import DecodeSettings, ReferenceEngine
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.families.registry import open_drafter
from tests.integration import tiny_models
from tests.integration.serving import Served

TOKENS = 48

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("tiny-pair")]


def test_served_steps_are_the_engines(
    tiny_published: Served, noisy: tiny_models.TinyPair, published_drafter: Path
) -> None:
    """Greedy tokens of plain decoding, and as many steps and accepted drafts as the engine has.

    Prompts are longer and shorter than the window, alone and eight at a time.
    """
    target = TargetModel.load(noisy.target, (0, 1))
    prompts = [[5 + (7 * i + j) % 200 for j in range(3 + 5 * i)] for i in range(8)]
    settings = DecodeSettings(max_new_tokens=TOKENS, batch=8)
    plain = ReferenceEngine(target, None, settings).run(prompts)
    drafter = open_drafter(published_drafter, target)
    drafted = ReferenceEngine(target, drafter, settings).run(prompts)
    fields = {"max_new_tokens": TOKENS, "sampling_params": {"ignore_eos": True}}
    alone = tiny_published.generate_all(prompts, 1, **fields)
    tiny_published.flush_cache()
    together = tiny_published.generate_all(prompts, 8, **fields)
    counts = []
    for reference, own, first, second in zip(plain, drafted, alone, together, strict=True):
        assert first["output_ids"] == second["output_ids"] == list(reference.tokens)
        accepted = sum(step.accepted for step in own.steps)
        counts.append(accepted)
        for answer in (first, second):
            assert answer["meta_info"]["spec_verify_ct"] == len(own.steps)
            assert answer["meta_info"]["spec_num_correct_drafts"] == accepted
    assert sum(counts) > TOKENS, "too few accepted drafts to tell anything"
    assert "DSparkMoEModel" in tiny_published.log
