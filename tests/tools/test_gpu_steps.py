"""The kit's look at a scheduled server's steps: traces, step times by tier, drafts left out."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.sweep.run_dir import Counters
from sglang_dspark.schedule.cost_table import CostTable, ProfileKey
from sglang_dspark.serving.step.spans import span
from tests.tools.test_gpu_kit import ROOT, dry_run
from tools.gpu.kit.models import TINY
from tools.gpu.kit.skip import skipped
from tools.gpu.kit.steps import by_tier, read_log
from tools.gpu.kit.trace import read_trace, summary

pytestmark = pytest.mark.xdist_group("gpu-kit")

# Two steps of 100 us. Of a launch's 40 us 30 are in SGLang's calls; planning is outside of it in
# the first step and within it in the second one.
HOST = [
    ("plan", 0, 6),
    ("step", 10, 50),
    ("draft", 12, 22),
    ("verify", 22, 42),
    ("learn", 60, 64),
    ("step", 110, 150),
    ("plan", 112, 116),
    ("draft", 116, 126),
    ("verify", 126, 146),
]
KERNELS = [
    ("kernel", "gemm", 20, 50),
    ("gpu_memcpy", "Memcpy DtoH", 40, 60),  # beside it, on another stream
    ("kernel", "_markov_kernel", 60, 62),
    ("kernel", "gemm", 80, 118),
    ("kernel", "_markov_kernel", 118, 120),
]


def written(folder: Path, events: list[dict[str, Any]]) -> Path:
    path = folder / "users-2-TP-0.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def event(category: str, name: str, begin: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin, "tid": 1}


def trace_of(folder: Path, kernels: list[tuple[str, str, float, float]]) -> Path:
    host = [event("user_annotation", f"dspark:{name}", a, b) for name, a, b in HOST]
    odd = [
        {"ph": "M", "name": "process_name"},
        event("cpu_op", "aten::add", 12, 13),
        event("user_annotation", "step[VERIFY bs=2]", 22, 42),
        event("gpu_user_annotation", "dspark:step", 20, 120),  # the span again, on the device
    ]
    return written(folder, [*odd, *host, *(event(*kernel) for kernel in kernels)])


def test_a_trace_says_what_host_and_device_do(tmp_path: Path) -> None:
    found = summary(read_trace(trace_of(tmp_path, KERNELS)))
    assert (found["steps"], found["period_us"]) == (2, 100)
    assert found["host_us"] == {"draft": 10, "learn": 4, "plan": 5, "step": 40, "verify": 20}
    assert found["ours_us"] == (2 * 10 + 6 + 4) / 2
    assert found["waits_us"] == 18 / 2  # from 62 to 80
    assert found["longest_wait_us"] == 18
    assert found["device_busy_share"] == pytest.approx(1 - 18 / 100)
    assert found["head_share"] == pytest.approx(4 / 100)
    assert found["kernels"]["gemm"] == 34


def test_without_a_device_there_is_nothing_of_it(tmp_path: Path) -> None:
    found = summary(read_trace(trace_of(tmp_path, [])))
    assert found["host_us"]["step"] == 40
    assert (found["waits_us"], found["device_busy_share"], found["kernels"]) == (None, None, {})


def test_torchs_profiler_writes_such_a_trace(tmp_path: Path) -> None:
    began = time.perf_counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        for _ in range(3):
            with span("plan"):
                pass
            with span("step"), span("verify"):
                torch.zeros(64, 64) @ torch.zeros(64, 64)
    whole_us = (time.perf_counter() - began) * 1e6
    path = tmp_path / "trace.json.gz"
    seen.export_chrome_trace(str(path))
    found = summary(read_trace(path))
    assert found["steps"] == 3
    assert set(found["host_us"]) == {"plan", "step", "verify"}
    assert 0 < found["ours_us"] < whole_us


@pytest.mark.parametrize("events", [None, [], [event("kernel", "gemm", 0, 1)]])
def test_what_is_no_trace_of_steps_is_one_line(tmp_path: Path, events: Any) -> None:
    path = tmp_path / "x.trace.json.gz"
    path.write_bytes(b"{" if events is None else b"")
    if events is not None:
        path = written(tmp_path, events)
    with pytest.raises(DSparkError, match=r"is no trace|has no step of ours"):
        read_trace(path)


def table(*, padded: bool) -> CostTable:
    """10 ms up to 8 tokens, 20 ms up to 16; a draft takes 2 ms."""
    key = ProfileKey("m", "d", "bf16", "gpu", "tp1", "graphs", "v", 2)
    return CostTable(
        key=key,
        knots=(8, 16),
        seconds=(0.010, 0.020),
        padded=padded,
        per_request=0.0,
        per_context=0.0,
        draft_requests=(1, 16),
        draft_seconds=((0.0, 0.002, 0.002), (0.0, 0.002, 0.002)),
    )


def line(requests: int, tokens: int, depth: int, measured: float | None) -> dict[str, Any]:
    return {
        "step": 1,
        "mode": "speculate",
        "requests": requests,
        "tokens": tokens,
        "context": 32 * requests,
        "depth": depth,
        "predicted_s": 0.011,
        "measured_s": measured,
    }


def test_step_times_are_compared_by_tier(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    lines = [line(4, 4, 0, 0.011), line(4, 8, 2, 0.012), line(4, 9, 2, None), line(4, 12, 2, 0.020)]
    log.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    small, large = by_tier(read_log(log), table(padded=True))
    assert (small["tier"], small["steps"], small["drafted"]) == (8, 2, 1)
    assert small["startup_ms"] == pytest.approx(11)  # of 10 and 12
    assert small["measured_ms"] == pytest.approx(11.5)
    assert small["corrected_ms"] == pytest.approx(11)
    assert (large["tier"], large["steps"]) == (16, 1)
    assert large["startup_ms"] == pytest.approx(22)
    assert large["startup_off"] == pytest.approx(0.1)
    assert [row["tier"] for row in by_tier(read_log(log), table(padded=False))] == [4, 8, 16]


def counters(steps: dict[str, float], skips: dict[str, float]) -> Counters:
    return Counters(at=0.0, requests=0.0, generated=0.0, prompt=0.0, steps=steps, skips=skips)


def test_the_share_of_steps_without_a_draft_is_of_the_round() -> None:
    before = counters({"speculate": 10, "plain": 30}, {"drafting does not pay": 30})
    after = counters({"speculate": 14, "plain": 126}, {"drafting does not pay": 126})
    found = skipped(before, after)
    assert (found["steps"], found["skipped"]) == (100, 0.96)
    assert found["reasons"] == {"drafting does not pay": 96}
    nothing = skipped(counters({}, {}), counters({}, {}))
    assert (nothing["steps"], nothing["skipped"]) == (None, None)


def check_steps(found: dict[str, Any]) -> None:
    figures = found["metrics"]
    assert figures["measured"] is False
    assert sum(row["steps"] for row in figures["rows"]) >= 20
    for row in figures["rows"]:
        assert row["measured_ms"] > 0
        assert row["startup_ms"] > 0
    traced = figures["traced_2"]
    assert traced["steps"] >= 4
    assert {"step", "plan", "draft", "admit", "verify", "accept", "learn"} <= set(traced["host_us"])
    assert 0 < traced["ours_us"] < traced["period_us"]
    assert traced["waits_us"] is None


@pytest.mark.slow
@pytest.mark.server
def test_a_servers_steps_are_logged_and_traced(tmp_path: Path) -> None:
    [found] = dry_run(tmp_path / "out", "steps").values()
    check_steps(found)


@pytest.mark.slow
@pytest.mark.server
def test_the_gpus_side_of_the_step_is_logged_and_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server rehearsed as in tests/rehearsal: under the overlap loop, padded to tiers."""
    (tmp_path / "overlap.yaml").write_text("cpu: {overlap: true}\n")
    monkeypatch.setenv("SGLANG_DSPARK_CONFIG", str(tmp_path / "overlap.yaml"))
    monkeypatch.setenv("DSPARK_REHEARSAL", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "rehearsal" / "site"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # the planted step times are nobody else's
    [found] = dry_run(tmp_path / "out", "steps").values()
    check_steps(found)
    rows = found["metrics"]["rows"]
    assert all(row["tier"] % (TINY.gamma + 1) == 0 for row in rows)
    assert all(abs(row["startup_off"]) < 0.05 for row in rows), "time there is planted"


@pytest.mark.slow
@pytest.mark.server
def test_drafts_that_do_not_pay_are_left_out(tmp_path: Path) -> None:
    [found] = dry_run(tmp_path / "out", "skip").values()
    figures = found["metrics"]
    assert figures["measured"] is False
    plain, dspark = sorted(figures["rows"], key=lambda row: row["server"], reverse=True)
    assert (plain["server"], plain["skipped"], plain["right"]) == ("plain", None, [384, 384])
    assert (dspark["server"], dspark["right"]) == ("dspark", [384, 384])
    assert dspark["skipped"] > 0.5
    [row] = figures["by_concurrency"]
    assert row["identical"] == [12, 12]
    assert row["speedup"] > 0
