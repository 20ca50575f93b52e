"""Sweeps of a real server that runs already: named by itself; a trace, a burst, probes."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from sglang_dspark.cli.sweep import sweep
from sglang_dspark.loadtest.client.records_file import read_records
from sglang_dspark.loadtest.client.traces import read_trace
from sglang_dspark.loadtest.servers.ask import ask_server
from sglang_dspark.loadtest.sweep import run_dir
from tests.integration import tiny_models
from tests.integration.serving import DSPARK_FLAGS, Served, ServerPool
from tools.traces.make import FOLDER

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("tiny")]


@pytest.fixture(scope="module")
def chatting(pool: ServerPool, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """A tiny pair with a chat template, all drafts verified."""
    pair = tiny_models.build(tmp_path_factory.mktemp("chatting"), noise=0.7)
    (pair.target / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    )
    config = pair.target.parent / "static.yaml"
    config.write_text("schedule: {mode: static}\n")
    flags = [*DSPARK_FLAGS, str(pair.drafter), "--enable-metrics", "--dspark-config", str(config)]
    return pool.start("chatting", pair.target, "--max-running-requests", "8", *flags)


def test_a_running_server_becomes_an_arm(chatting: Served, tmp_path: Path) -> None:
    chatting.healthy()  # the one that runs
    url = chatting.process.spec.url
    asked = ask_server(url)
    assert (asked.algorithm, asked.drafts) == ("DSPARK", tiny_models.GAMMA)
    assert (asked.device, asked.metrics) == ("cpu", True)
    assert Path(asked.model) == chatting.process.spec.model

    run = tmp_path / "run"
    sweep(url=[url], out=run, concurrency="2", trials=1, seconds=1.0)
    info, (cell,) = run_dir.read_run(run), run_dir.read_cells(run)
    assert [(arm.name, arm.gamma) for arm in info.arms] == [("dspark", tiny_models.GAMMA)]
    assert (cell.ok, cell.failures, cell.disagreements) == (cell.requests, {}, [])
    assert cell.tau is not None
    assert cell.tau > 1
    _, records = read_records(run / "cells" / f"{cell.name}.parquet")
    assert sum(record.total_tokens for record in records) == cell.tokens


@pytest.mark.slow
def test_recorded_load_burst_and_probes_are_sent_as_planned(
    chatting: Served, tmp_path: Path
) -> None:
    chatting.healthy()
    trace = {"file": str(FOLDER / "made-mooncake.jsonl"), "format": "mooncake"}
    burst = {"load": 0.2, "factor": 4, "before_s": 1, "burst_s": 0.5, "after_s": 1}
    file, run = tmp_path / "replay.yaml", tmp_path / "run"
    file.write_text(
        yaml.safe_dump(
            {
                "arms": ["dspark"],
                "arms_folder": str(FOLDER.parents[1] / "serve"),
                "baseline": "dspark",
                "urls": {"dspark": chatting.process.spec.url},
                "target": str(chatting.process.spec.model),
                "device": "cpu",
                "concurrency": [1],
                "open": {"trace": {**trace, "first": 8, "speed": 40}, "burst": burst},
                "hold": {"p95_tpot_ms": 1e6, "probes": 2, "seconds": 1, "requests": 8},
                "trials": 1,
                "seconds": 0.5,
            }
        )
    )
    sweep(config=file, out=run)
    open_loop = [cell for cell in run_dir.read_cells(run) if cell.loop == "open"]
    (surge,) = [cell for cell in open_loop if cell.phases]
    assert sum(phase.ok for phase in surge.phases) == surge.ok == surge.requests
    assert all(phase.ttft_p99 for phase in surge.phases)
    probes = [cell for cell in open_loop if cell.within is not None]
    assert 1 <= len(probes) <= 2
    for probe in probes:
        assert probe.within is not None
        assert (probe.within.held, probe.within.requests) == (True, probe.requests)
    (cell,) = [cell for cell in open_loop if not cell.phases and cell.within is None]
    _, records = read_records(run / "cells" / f"{cell.name}.parquet")
    rows = read_trace(FOLDER / "made-mooncake.jsonl", "mooncake", first=8).rows
    assert [record.outcome for record in records] == ["ok"] * len(rows)
    assert [record.prompt_tokens for record in records] == [row.prompt_tokens for row in rows]
    assert [record.total_tokens for record in records] == [row.answer_tokens for row in rows]
    assert [record.scheduled for record in records] == [row.at / 40 for row in rows]
    assert cell.disagreements == []
