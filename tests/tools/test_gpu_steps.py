"""The kit's look at a scheduled server's steps: traces, step times by tier."""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_dspark.errors import DSparkError
from sglang_dspark.schedule.cost_table import CostTable, ProfileKey
from sglang_dspark.step.timing import span
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


def test_a_prefill_before_the_first_step_counts_for_none(tmp_path: Path) -> None:
    found = summary(read_trace(trace_of(tmp_path, [("kernel", "prefill", 1, 9), *KERNELS])))
    assert "prefill" not in found["kernels"]
    assert found["waits_us"] == 18 / 2


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
