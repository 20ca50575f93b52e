"""A drafter with experts: where it may be served."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_dspark.backends import drafter_check
from sglang_dspark.backends.cuda.features import SCHEDULED
from sglang_dspark.errors import DSparkError
from sglang_dspark.serving.mode import COMPACT, VARIABLE
from tests.backends.cuda.test_features import USUAL
from tests.drafter.helpers import tiny_config

SHAPE = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_experts": 4,
    "experts_per_token": 2,
    "moe_intermediate_size": 64,
    "num_shared_experts": 1,
    "residual_streams": 4,
    "window": 16,
    "expert_format": "fp8",
}


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(**SHAPE).to_json()))
    return tmp_path


def arguments(**changed: Any) -> SimpleNamespace:
    usual = {"tp_size": 1, "ep_size": 1, "attn_dp_size": 1, "device": "cuda"}
    return SimpleNamespace(**(usual | {"enable_unified_memory": False} | changed))


@pytest.mark.parametrize("device", ["cpu", "cuda", "cuda:1"])
def test_it_is_served_on_cpus_and_nvidia_gpus(drafter: Path, device: str) -> None:
    drafter_check._check_moe(drafter, arguments(device=device))


def test_on_a_gpu_it_is_scheduled(drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_check, "_start", lambda *given: USUAL)
    monkeypatch.setenv(VARIABLE, "")
    drafter_check._choose_mode(None, drafter, arguments())
    assert os.environ[VARIABLE] == COMPACT
    assert any("DSparkMoEModel" in name for name, _ in SCHEDULED)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp_size": 2}, "cannot be split over 2 ranks: its experts' width 64, in blocks of 128"),
        ({"tp_size": 2, "ep_size": 2}, "its shared experts' width 64, in blocks of 128"),
        ({"tp_size": 3}, "3 does not divide its 4 query"),
        ({"tp_size": 4, "ep_size": 3}, "--ep-size 3 does not divide --tp-size 4"),
        ({"device": "npu"}, "on CPUs and on NVIDIA GPUs, not on npu; use a dense drafter"),
        ({"enable_unified_memory": True}, "has a window, .*; remove --enable-unified-memory"),
    ],
)
def test_what_is_not_served_is_refused(drafter: Path, change: dict, message: str) -> None:
    with pytest.raises(DSparkError, match=message):
        drafter_check._check_moe(drafter, arguments(**change))


def test_sglang_has_the_arguments_that_are_read() -> None:
    from sglang.srt.server_args import ServerArgs

    read = set(vars(arguments())) - {"attn_dp_size"}  # a view's, of --dp-size
    assert read <= set(ServerArgs.__annotations__)
