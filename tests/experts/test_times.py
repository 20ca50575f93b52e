"""Test the measured times of backends: which are timed or skipped, and which files are read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from triton import OutOfResources

from sglang_dspark.backends.moe import expert_backends
from sglang_dspark.errors import DSparkError
from sglang_dspark.experts import times
from sglang_dspark.experts.backends import BACKENDS, Backend, ExpertWeights, register
from sglang_dspark.experts.dispatch import Chooser
from sglang_dspark.experts.times import TimesKey, TimesTable, Timing
from tests.experts.test_dispatch import SMALL, weights

KEY = TimesKey.of(SMALL, "here; 1 compute threads", "torch 0")


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A cache and a registry of the test's own; no gradients, as in a server."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = dict(BACKENDS)
    with torch.no_grad():
        yield
    BACKENDS.clear()
    BACKENDS.update(before)


def test_what_is_here_is_timed_and_what_is_wrong_is_skipped() -> None:
    reference = BACKENDS["torch"].prepare

    def wrong(given: ExpertWeights):
        call = reference(given)
        return lambda x, ids, own: call(x, ids, own.flip(-1))

    def broken(given: ExpertWeights):
        raise OSError("libcudart.so is missing")

    def too_large(given: ExpertWeights):
        raise OutOfResources(104_448, 101_376, "shared memory")

    register(Backend("too large", lambda: None, lambda s: None, too_large))
    register(Backend("wrong", lambda: None, lambda s: None, wrong))
    register(Backend("broken", lambda: None, lambda s: None, broken))
    table = times.measure(weights(), SMALL, KEY, tokens=(1, 300), repeats=2)
    assert {t.backend for t in table.timings if t.tokens == 1} == {"compiled", "torch"}
    assert {t.backend for t in table.timings if t.tokens == 300} == {"torch"}
    assert table.refused["wrong"].startswith("its result differs from the reference by")
    assert table.refused["broken"] == "failed: libcudart.so is missing"
    assert table.refused["too large"].startswith("failed: out of resource: shared memory")
    assert table.refused["triton"] == "for CUDA devices"
    assert "1 tokens" in str(table)
    assert "torch" in str(table)


def test_a_table_is_measured_once_and_read_again() -> None:
    path = times.cache_path(KEY)
    assert not path.exists()
    first = times.load_or_measure(weights(), SMALL, KEY)
    assert path.is_file()
    assert times.load_or_measure(weights(), SMALL, KEY) == first


def test_a_failure_is_logged_and_not_saved(caplog: pytest.LogCaptureFixture) -> None:
    def broken(given: ExpertWeights):
        raise RuntimeError("no room")

    register(Backend("broken", lambda: None, lambda s: None, broken), before="compiled")
    table = times.load_or_measure(weights(), SMALL, KEY)
    assert not times.cache_path(KEY).exists()
    assert table.unfit == {"broken": "failed: no room"}
    assert Chooser(SMALL, table).name(1) in ("compiled", "torch")
    assert "broken failed: no room" in caplog.text


def test_times_are_of_calls_without_gradients() -> None:
    """As passes are; the compiled experts take no others."""
    with torch.enable_grad():
        table = times.measure(weights(), SMALL, KEY, tokens=(1,), repeats=1)
    assert {t.backend for t in table.timings} == {"compiled", "torch"}


def test_for_graphs_only_what_a_graph_may_hold_is_timed() -> None:
    register(Backend("static", lambda: None, lambda s: None, BACKENDS["torch"].prepare))
    table = times.measure(weights(), replace(SMALL, graph=True), KEY, tokens=(1,), repeats=1)
    assert {t.backend for t in table.timings} == {"static"}
    assert table.refused["torch"] == "reads counts on the host, which a graph cannot"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_graph_of_the_call_is_timed() -> None:
    """A backend whose capture fails is skipped, and the device is unchanged."""
    register(Backend("reader", lambda: None, lambda s: None, BACKENDS["torch"].prepare))
    on_gpu = replace(
        SMALL,
        device="cuda",
        dtype=torch.bfloat16,
        graph=True,
        capability=torch.cuda.get_device_capability(),
    )
    values = weights().values
    assert values is not None
    gate, up, down = (part.cuda().bfloat16() for part in values)
    table = times.measure(ExpertWeights("bf16", (gate, up, down)), on_gpu, KEY, repeats=2)
    assert {t.tokens for t in table.timings if t.backend == "triton"} == set(times.TOKENS)
    assert table.refused["reader"].startswith("failed: ")


def test_files_that_are_not_of_here_are_refused() -> None:
    path = times.folder() / "table.json"
    rows = (Timing(1, "torch", 5.0), Timing(8, "torch", 7.0))
    table = TimesTable(KEY, "2026-01-01T00:00:00+00:00", rows, {"triton": "for CUDA devices"})
    times.save(table, path)
    assert times.load(path, KEY) == table
    for change in ({"device": "there"}, {"versions": "torch 1"}, {"shape": "others"}):
        with pytest.raises(DSparkError, match=f"measured elsewhere .{next(iter(change))}: "):
            times.load(path, replace(KEY, **change))
    document = json.loads(path.read_text())
    for wrong in (
        [],
        {**document, "format_of_table": 0},
        {**document, "more": 1},
        {**document, "timings": [{"tokens": 1, "backend": "torch", "us": -1}]},
        {**document, "timings": [{"tokens": 1, "backend": "torch", "us": 1e308}]},
        {**document, "timings": [{"tokens": 1, "backend": "unknown", "us": 1.0}]},
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(DSparkError, match="no table of expert times"):
            times.read(path)
    with pytest.raises(DSparkError, match="cannot read the table of expert times"):
        times.read(path.with_name("none.json"))


def test_the_nearest_by_ratio() -> None:
    rows = (Timing(1, "torch", 1.0), Timing(8, "torch", 8.0), Timing(64, "torch", 64.0))
    table = TimesTable(KEY, "", rows, {})
    found = [table.near(n)["torch"] for n in (0, 2, 3, 20, 25, 4096)]
    assert found == [1.0, 1.0, 8.0, 8.0, 64.0, 64.0]
    assert TimesTable(KEY, "", (), {}).near(3) == {}


def test_a_cache_that_cannot_be_used_is_no_obstacle(caplog: pytest.LogCaptureFixture) -> None:
    """The server starts, says so in one line, measures again, and keeps that if it can."""
    from tests.drafter.helpers import tiny_config

    shape = tiny_config(hidden_size=64, num_experts=4, experts_per_token=2,
                        moe_intermediate_size=32)  # fmt: skip
    situation = expert_backends.workload_of(shape, "cpu", torch.float32)
    path = times.cache_path(expert_backends.key_of(situation))
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    measured = expert_backends.chooser_for(weights(), shape).times
    assert measured is not None
    assert f"{path} is no table of expert times" in caplog.text
    assert times.read(path) == measured
    path.unlink()
    path.mkdir()
    assert expert_backends.chooser_for(weights(), shape).times is not None
    assert f"cannot read the table of expert times {path}" in caplog.text
    assert f"{path} is no file that can be replaced" in caplog.text
    assert list(path.parent.iterdir()) == [path], "no temporary file is left"
