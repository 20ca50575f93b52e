"""The default KV pool: a quarter of the memory free at the start, unless the user sized it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache import kv_cache_configurator as upstream

from sglang_dspark.backends.cpu import rank_resources, threads
from sglang_dspark.patches.cpu import process_defaults
from tests.patches.hooked import put_in

GIB = 1 << 30


def budget(monkeypatch: pytest.MonkeyPatch, free: float, **given: Any) -> float:
    """GiB for the pool, by SGLang's own function, of 20 GiB at the start and `free` left now."""
    fixed = {
        "get_available_gpu_memory": free,
        "get_parallel": SimpleNamespace(
            launch_world_size=1, world_group=SimpleNamespace(cpu_group=None)
        ),
        "get_schedule": SimpleNamespace(
            mem_fraction_static=0.9, prefill_max_requests=None, max_mamba_cache_size=None
        ),
        "get_exec": SimpleNamespace(
            graph=SimpleNamespace(
                cuda_graph_config=SimpleNamespace(
                    prefill=SimpleNamespace(full_prefill_max_req=None, backend=None)
                )
            )
        ),
        "get_disagg": SimpleNamespace(disaggregation_mode="null"),
        "get_mm": SimpleNamespace(mm_feature_transport=None),
        "mm_runtime_reservation_gb": 0.0,
    }
    for name, value in fixed.items():
        monkeypatch.setattr(upstream, name, lambda *_, value=value, **__: value)
    put_in(monkeypatch, process_defaults.SEAMS[:1])
    rank: Any = object.__new__(upstream.KVCacheConfigurator)
    rank.device, rank.gpu_id, rank.mambaish_config = "cpu", 0, None
    rank.model_config = SimpleNamespace(is_multimodal=False)
    rank.server_args = SimpleNamespace(_raw_input=given)
    return float(rank._profile_available_bytes(20)) / GIB


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_default_is_a_quarter(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ranks: int
) -> None:
    monkeypatch.setenv(threads.RANKS, str(ranks))
    monkeypatch.setattr(rank_resources, "memory_nodes", lambda: 1)
    with caplog.at_level("INFO"):
        assert budget(monkeypatch, 18.0) == pytest.approx(5.0 / ranks)
    assert "a quarter of the 20.0 GiB" in caplog.text


def test_less_stays_less(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert budget(monkeypatch, 6.0) == pytest.approx(4.0)
    assert "quarter" not in caplog.text


@pytest.mark.parametrize("given", [{"max_total_tokens": 100}, {"mem_fraction_static": 0.9}])
def test_the_users_size_is_kept(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    assert budget(monkeypatch, 18.0, **given) == pytest.approx(16.0)
