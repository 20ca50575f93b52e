"""CUDA's side of the step with a converted drafter of the small public shape, in graphs.

32,000 of 128,256 tokens, a window of 2,048 in one layer, blocks of 8: the heads' rows of the tokens
outside are not multiplied there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sglang_dspark.drafter.target_fit import Target
from sglang_dspark.evaluation.engine import DecodeSettings, ReferenceEngine
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.serving.checkpoint import convert_drafter
from tests.integration import tiny_models
from tests.integration.serving import Served, ServerPool
from tests.integration.test_published import LONG, TOKENS
from tests.rehearsal.conftest import start_rehearsed
from tests.rehearsal.test_overlap_steps import GREEDY, PROMPTS

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("rehearsal")]


@pytest.mark.slow
def test_greedy_answers_are_plain_decodings(pool: ServerPool, tmp_path: Path) -> None:
    pair = tiny_models.build_public_shape(tmp_path)
    graphs = ("--cuda-graph-bs-decode", "1", "4")
    rehearsed = start_rehearsed(pool, "public-shape", pair, *graphs, DSPARK_REHEARSAL_GRAPHS="1")
    settings = DecodeSettings(max_new_tokens=TOKENS, batch=len(LONG))
    plain = ReferenceEngine(TargetModel.load(pair.target), None, settings).run(LONG)
    fields = {"max_new_tokens": TOKENS, "sampling_params": {"ignore_eos": True}}
    got = rehearsed.server.generate_all(LONG, len(LONG), **fields)
    assert [each["output_ids"] for each in got] == [list(each.tokens) for each in plain]
    assert sum(each["meta_info"]["spec_num_correct_drafts"] for each in got) > 6 * len(LONG)
    assert "sglang-dspark: mode compact" in rehearsed.server.log, "every draft is verified"
    assert "drafts span 32000 of 128256 tokens" in rehearsed.server.log
    assert all(each["replayed"] for each in rehearsed.passes())
    pool.stop("public-shape")


@pytest.mark.slow
def test_a_drafter_that_skips_its_anchors_row_is_scheduled(
    pool: ServerPool, pair: tiny_models.TinyPair, plain: Served, tmp_path: Path
) -> None:
    """180 of 260 tokens, causal windows of 16 in two of three layers, a gated head: a block of
    gamma + 1 rows."""
    depth, width = tiny_models.LAYERS, tiny_models.HIDDEN
    target = Target(str(pair.target), width, 260, depth, "LlamaForCausalLM")
    published = tiny_models.build_published(tmp_path / "published", pair)
    convert_drafter(published, tmp_path / "drafter", target)
    converted = replace(pair, drafter=tmp_path / "drafter")
    graphs = ("--cuda-graph-bs-decode", "1", "4")
    rehearsed = start_rehearsed(pool, "1-plus-n", converted, *graphs, DSPARK_REHEARSAL_GRAPHS="1")
    expected = plain.generate_all(PROMPTS, 4, **GREEDY)
    got = rehearsed.server.generate_all(PROMPTS, 4, **GREEDY)
    assert [each["output_ids"] for each in got] == [each["output_ids"] for each in expected]
    assert sum(each["meta_info"]["spec_num_correct_drafts"] for each in got) > len(PROMPTS)
    assert "sglang-dspark: mode compact" in rehearsed.server.log, "every draft is verified"
    pool.stop("1-plus-n")
