"""CUDA's side of the step with a converted drafter of the small public shape, in graphs.

32,000 of 128,256 tokens, a window of 2,048 in one layer, blocks of 8: the heads' rows of the tokens
outside are not multiplied there.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dspark.evaluation.engine import DecodeSettings, ReferenceEngine
from sglang_dspark.evaluation.target import TargetModel
from tests.integration import tiny_models
from tests.integration.serving import ServerPool
from tests.integration.test_published import LONG, TOKENS
from tests.rehearsal.conftest import start_rehearsed

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
