"""CUDA's side of the step with a target whose layers keep a state, in graphs and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration import tiny_models
from tests.integration.serving import ServerPool
from tests.rehearsal.conftest import SLOTS, start_rehearsed
from tests.rehearsal.test_overlap_steps import GREEDY, PROMPTS

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("rehearsal")]


@pytest.mark.parametrize("graphs", ["0", "1"])
def test_greedy_answers_are_plain_decodings(graphs: str, pool: ServerPool, tmp_path: Path) -> None:
    pair = tiny_models.build_architecture(tmp_path, "qwen3_5")
    plain = pool.start("recurrent-plain", pair.target, "--max-running-requests", SLOTS)
    sizes = ("--cuda-graph-bs-decode", "1", "4") if graphs == "1" else ()
    rehearsed = start_rehearsed(
        pool,
        f"recurrent{graphs}",
        pair,
        "--disable-radix-cache",
        *sizes,
        DSPARK_REHEARSAL_GRAPHS=graphs,
    )
    expected = plain.generate_all(PROMPTS, 4, **GREEDY)
    got = rehearsed.server.generate_all(PROMPTS, 4, **GREEDY)
    assert [each["output_ids"] for each in got] == [each["output_ids"] for each in expected]
    assert sum(each["meta_info"]["spec_num_correct_drafts"] for each in got) > len(PROMPTS)
    assert all(bool(each["replayed"]) == (graphs == "1") for each in rehearsed.passes())
    pool.stop(f"recurrent{graphs}")
