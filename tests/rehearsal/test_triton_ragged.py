"""Test ragged windows on the Triton attention backend, with its kernels in the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration import tiny_models
from tests.integration.serving import Served, ServerPool
from tests.rehearsal.conftest import start_rehearsed

FEW, MANY = 12, 60  # cases; each takes a second or two
FULL = 6  # gamma + 1
TOLERANCE = 1e-6  # float32 sums in another order; about 3e-7 is seen


@pytest.fixture(scope="module", params=[FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def cases(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.rehearsal.triton_cases", str(request.param)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == request.param
    return found


def test_windows_are_those_of_dense_attention(cases: list[dict[str, Any]]) -> None:
    assert max(case["eager"] for case in cases) <= TOLERANCE


def test_sglangs_kernel_reads_the_same_windows(cases: list[dict[str, Any]]) -> None:
    """Keep the passes right that our kernel leaves to it."""
    tried = [case["extend"] for case in cases if "extend" in case]
    assert len(tried) >= 10
    assert max(tried) <= TOLERANCE


def test_graphs_with_empty_slots_read_the_same_windows(cases: list[dict[str, Any]]) -> None:
    assert {case["empty_slots"] for case in cases} == {0, 1, 2}
    assert max(case["graph"] for case in cases) <= TOLERANCE


def test_a_full_graph_leaves_no_row_unwritten(cases: list[dict[str, Any]]) -> None:
    """With as many requests as slots, tokens behind the windows are the last window's."""
    full = [case for case in cases if case["empty_slots"] == 0]
    assert sum(case["spare"] > 0 for case in full) >= 2
    assert [case["unwritten"] for case in full] == [0] * len(full)


def test_without_our_hooks_ragged_windows_are_wrong(cases: list[dict[str, Any]]) -> None:
    """The comparison can fail: upstream looks for every window where one of full width would be."""
    tried = [case for case in cases if "upstream" in case and set(case["windows"][:-1]) - {FULL}]
    assert len(tried) >= 5
    assert min(case["upstream"] for case in tried) > 1e-3


@pytest.mark.server
@pytest.mark.xdist_group("rehearsal")
@pytest.mark.parametrize("graphs", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_four_users_are_answered_as_by_the_plain_server(
    plain: Served, pool: ServerPool, pair: tiny_models.TinyPair, graphs: str, tmp_path: Path
) -> None:
    """Without our hooks the server aborts here: rows of one window are written over another's."""
    prompts = [[5 + (7 * i + 3 * j) % 200 for j in range(3 + 2 * i)] for i in range(4)]
    greedy = {"max_new_tokens": 8, "sampling_params": {"ignore_eos": True}}
    expected = plain.generate_all(prompts, 4, **greedy)
    config = tmp_path / "threshold.yaml"  # interpreted passes are too slow to be profiled in time
    config.write_text("cpu: {overlap: true}\nschedule: {threshold: 0.5, profile_seconds: 1}\n")
    triton = start_rehearsed(
        pool,
        f"triton-{graphs}",
        pair,
        *("--attention-backend", "triton", "--speculative-draft-attention-backend", "triton"),
        *("--max-running-requests", "4", "--cuda-graph-bs-decode", "1", "2", "4"),
        *("--dspark-config", str(config)),
        TRITON_INTERPRET="1",
        DSPARK_REHEARSAL_GRAPHS=graphs,
        DSPARK_REHEARSAL_STAIR="8e-3",
    )
    got = triton.server.generate_all(prompts, 4, **greedy)
    assert [each["output_ids"] for each in got] == [each["output_ids"] for each in expected]
    assert all(bool(each["replayed"]) == (graphs == "1") for each in triton.passes())
    assert any(0 < each["verified"] < 5 * each["pass"] for each in triton.passes())
    assert all("attend_triton" in each["operators"] for each in triton.passes())
