"""The key of step times: what changes a pass changes the key."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dspark.schedule.cost_table import ProfileKey
from sglang_dspark.step import build


def key_of(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> ProfileKey:
    """The key of a small server; changed: of its model's configuration, or `cache`."""
    from sglang.srt import runtime_context

    parallel = SimpleNamespace(tp_size=1, dp_size=1, moe_ep_size=1)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: parallel)
    config = {"model_path": "target", "quantization": None, "model_override_args": {}} | changed
    cache = config.pop("cache", torch.float32)
    target = SimpleNamespace(
        model_config=SimpleNamespace(**config),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(9, 4)),
        kv_cache_dtype=cache,
        dtype=torch.float32,
        attn_backend=object(),
    )
    draft = SimpleNamespace(model_config=SimpleNamespace(model_path="drafter"))
    worker = SimpleNamespace(model_runner=target, draft_model_runner=draft, gamma=5)
    return build.profile_key(worker, "a processor", "eager")


@pytest.mark.parametrize(
    "changed",
    [
        {"model_path": "another"},
        {"quantization": "fp8"},
        {"model_override_args": {"rope_theta": 2e6}},
        {"cache": torch.bfloat16},
    ],
)
def test_a_changed_pass_has_another_key(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]
) -> None:
    usual = key_of(monkeypatch)
    assert key_of(monkeypatch) == usual
    assert key_of(monkeypatch, **changed) != usual
