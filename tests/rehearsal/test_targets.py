"""CUDA's side of the step, in graphs, with targets whose features SGLang does not hand to DSPARK.

Qwen2's come by its hook for EAGLE-3, Granite's by hooks on the layers, which run at the capture
alone: a replay must write into the same features.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import tiny_models
from tests.integration.serving import ServerPool
from tests.rehearsal.conftest import SLOTS, start_rehearsed
from tests.rehearsal.test_overlap_steps import GREEDY, PROMPTS

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.xdist_group("rehearsal")]


@pytest.mark.parametrize("name", ["qwen2", "granite"])
def test_greedy_answers_are_plain_decodings(name: str, pool: ServerPool, tmp_path: Path) -> None:
    pair = tiny_models.build_architecture(tmp_path, name)
    plain = pool.start(f"{name}-plain", pair.target, "--max-running-requests", SLOTS)
    graphs = ("--cuda-graph-bs-decode", "1", "4")
    rehearsed = start_rehearsed(pool, name, pair, *graphs, DSPARK_REHEARSAL_GRAPHS="1")
    expected = plain.generate_all(PROMPTS, 4, **GREEDY)
    got = rehearsed.server.generate_all(PROMPTS, 4, **GREEDY)
    assert [each["output_ids"] for each in got] == [each["output_ids"] for each in expected]
    assert sum(each["meta_info"]["spec_num_correct_drafts"] for each in got) > len(PROMPTS)
    assert all(each["replayed"] for each in rehearsed.passes())
    pool.stop(name)
