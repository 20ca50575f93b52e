"""Test which passes of the Triton backend run on our attention kernel, and its arguments."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dspark.kernels.window_inputs import Context, Rule, Windows
from sglang_dspark.patches import registry
from sglang_dspark.patches.cuda import triton_attention
from sglang_dspark.serving.config import DSparkConfig, VerifyConfig

OPTIONS: dict[str, Any] = {
    "logit_cap": 5.0,
    "sliding_window_size": -1,
    "sinks": None,
    "window_kv_offsets": None,
    "xai_temperature_len": -1,
    "page_size": 1,
    "score_mod": None,
    "aux_tensors": None,
    "extend_seq_lens_cpu": None,
}


class Upstreams:
    """Upstream's backend: its kernel notes the pass."""

    ran: list[str]

    def _forward_extend_kernel(self, layer: Any, *rows: Any, **options: Any) -> None:
        assert (layer, len(rows), set(options)) == ("layer", 16, set(OPTIONS))
        self.ran.append("upstream")


class Passes:
    """Records which kernel a pass of two windows ran on, and the arguments of ours."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.ran: list[str] = []
        self.given: tuple[Windows, Context, Rule, torch.Tensor] | None = None
        monkeypatch.setattr(triton_attention, "attend_triton", self._ours)
        triton_attention._report.cache_clear()

    def run(
        self, *, verify: bool = True, mask: Any = None, dllm: Any = None, **options: Any
    ) -> str:
        metadata = SimpleNamespace(mask_indptr=torch.zeros(3) if verify else None)
        backend: Any = registry.derive(Upstreams, triton_attention.TritonAttention)()
        backend.forward_metadata, backend.dllm_attention, backend.ran = metadata, dllm, self.ran
        rows = torch.ones(4, 2, 8), torch.ones(4, 1, 8), torch.ones(4, 1, 8), torch.zeros(4, 2, 8)
        cache = torch.ones(9, 1, 8), torch.ones(9, 1, 8)
        starts = torch.tensor([0, 1, 4]), torch.tensor([0, 5, 7]), torch.arange(1, 9)
        after = mask, True, metadata.mask_indptr, 3, 0.5, 2.0, 8**-0.5
        backend._forward_extend_kernel("layer", *rows, *cache, *starts, *after, **OPTIONS | options)
        return self.ran.pop()

    def _ours(self, *given: Any) -> None:
        self.ran.append("ours")
        self.given = given  # type: ignore[assignment]


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    return Passes(monkeypatch)


def test_a_verify_pass_is_ours(passes: Passes) -> None:
    assert passes.run() == "ours"
    assert passes.given is not None
    windows, context, rule, out = passes.given
    assert windows.longest == 3
    assert windows.starts.tolist() == [0, 1, 4]
    assert context.starts.tolist() == [0, 5, 7]
    assert (context.key_scale, context.value_scale) == (0.5, 2.0)
    assert rule == Rule(8**-0.5, causal=True, sliding=-1, logit_cap=5.0)
    assert out.shape == (4, 2, 8)


def test_a_window_of_no_tokens_is_none_as_upstream(passes: Passes) -> None:
    for given, expected in ((0, -1), (-1, -1), (7, 7)):
        passes.run(sliding_window_size=given)
        assert passes.given is not None
        assert passes.given[2].sliding == expected


def test_other_passes_are_upstreams(passes: Passes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert passes.run(verify=False) == "upstream"
        assert passes.run(mask=torch.ones(9)) == "upstream"
        assert passes.run(dllm=object()) == "upstream"
    assert not caplog.records


def test_the_configuration_leaves_all_passes_to_upstream(
    passes: Passes, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = DSparkConfig(verify=VerifyConfig(window_kernel=False))
    monkeypatch.setattr(triton_attention, "current_config", lambda: config)
    assert passes.run() == "upstream"


def test_what_is_not_supported_is_logged_once(
    passes: Passes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assert passes.run(xai_temperature_len=16) == "upstream"
            assert passes.run(score_mod=abs) == "upstream"
    assert [record.getMessage() for record in caplog.records] == [
        "sglang-dspark: verify windows are read by SGLang's extend kernel: "
        "the layer scales its scores by position",
        "sglang-dspark: verify windows are read by SGLang's extend kernel: "
        "the layer adds a term of its own to its scores",
    ]
