"""Test that SGLang builds what scheduling by confidence needs, before the models load."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang.srt.configs.qwen3_5 import Qwen3_5TextConfig
from sglang.srt.configs.qwen3_next import Qwen3NextConfig

from sglang_dspark.backends import drafter_check
from sglang_dspark.errors import DSparkError
from sglang_dspark.serving.mode import COMPACT, VARIABLE
from tests.backends.cuda.test_features import ROWS, USUAL


@pytest.fixture
def drafter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, "")
    (tmp_path / "config.json").write_text(json.dumps({"enable_confidence_head": True}))
    return tmp_path


def mode_after(drafter: Path, device: str) -> str:
    """SGLang's variable once the drafter was looked at."""
    import os

    drafter_check._choose_mode(None, drafter, SimpleNamespace(device=device))
    return os.environ[VARIABLE]


def test_on_a_gpu_the_usual_start_is_scheduled(
    drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter_check, "_start", lambda *given: USUAL)
    assert mode_after(drafter, "cuda") == COMPACT


@pytest.mark.parametrize("feature", sorted(ROWS))
def test_on_a_gpu_the_obstacle_is_logged_in_one_line(
    drafter: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    feature: str,
) -> None:
    monkeypatch.setattr(drafter_check, "_start", lambda *given: ROWS[feature])
    with caplog.at_level(logging.INFO):
        assert mode_after(drafter, "cuda") == ""
    assert len(caplog.records) == 1
    assert caplog.records[0].message.startswith("sglang-dspark: every draft is verified: ")


def test_on_a_gpu_a_drafter_without_a_head_is_scheduled(
    drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (drafter / "config.json").write_text(json.dumps({"enable_confidence_head": False}))
    monkeypatch.setattr(drafter_check, "_start", lambda *given: USUAL)
    assert mode_after(drafter, "cuda") == COMPACT
    monkeypatch.setenv(VARIABLE, COMPACT)  # named by the user: then SGLang reads the head
    assert not drafter_check._reads_confidence(drafter)


def test_a_named_mode_is_the_users(drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_check, "_start", lambda *given: USUAL)
    monkeypatch.setenv(VARIABLE, "static")
    assert mode_after(drafter, "cuda") == "static"


def test_other_devices_keep_sglangs_own(drafter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_check, "_start", lambda *given: USUAL)
    assert mode_after(drafter, "npu") == ""


@pytest.mark.parametrize("asked", [{"enable_lora": True}, {"lora_paths": ["a=/adapters/a"]}])
def test_on_a_cpu_adapters_are_refused(
    drafter: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, object]
) -> None:
    monkeypatch.setattr(drafter_check.upstream, "model_config_of", lambda args: None)
    monkeypatch.setattr(drafter_check.upstream, "mambaish_config", lambda config: None)
    usual = {"device": "cpu", "enable_lora": None, "lora_paths": None}
    drafter_check._choose_mode(None, drafter, SimpleNamespace(**usual))
    with pytest.raises(DSparkError, match="merge the adapter into the checkpoint"):
        drafter_check._choose_mode(None, drafter, SimpleNamespace(**(usual | asked)))


def test_on_a_cpu_only_qwen3_5s_recurrent_state_is_served(
    drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta_rule: list[object] = [Qwen3_5TextConfig()]
    monkeypatch.setattr(drafter_check.upstream, "model_config_of", lambda args: None)
    monkeypatch.setattr(drafter_check.upstream, "mambaish_config", lambda config: object())
    monkeypatch.setattr(drafter_check.upstream, "hybrid_gdn_config", lambda config: delta_rule[-1])
    args = SimpleNamespace(device="cpu", enable_lora=None, lora_paths=None)
    drafter_check._choose_mode(None, drafter, args)
    for other in (Qwen3NextConfig(), None):
        delta_rule.append(other)
        with pytest.raises(DSparkError, match="recurrent state other than"):
            drafter_check._choose_mode(None, drafter, args)


class Wrapping:
    """A target's configuration that wraps the attention backend, as Dots 3's does."""

    def wrap_attention_backend(self) -> None: ...


@pytest.mark.parametrize(
    ("architecture", "text", "own"),
    [
        ("LlamaForCausalLM", object(), False),
        ("MiniMaxM3SparseForCausalLM", object(), True),
        ("Dots3ForCausalLM", Wrapping(), True),
    ],
)
def test_a_start_is_judged_by_its_target(
    monkeypatch: pytest.MonkeyPatch, architecture: str, text: object, own: bool
) -> None:
    target = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=[architecture]),
        hf_text_config=text,
    )
    monkeypatch.setattr(drafter_check.upstream, "model_config_of", lambda args: target)
    monkeypatch.setattr(drafter_check.upstream, "mambaish_config", lambda config: None)
    found: list[object] = [object(), None, type("JetNemotronConfig", (), {})()]
    monkeypatch.setattr(drafter_check.upstream, "hybrid_gdn_config", lambda config: found[0])
    assert drafter_check._start(None, USUAL.args).own_attention == own
    judged = []
    while found:
        judged.append(drafter_check._start(None, USUAL.args).delta_rule)
        found.pop(0)
    assert judged == [True, False, False]  # Jet's layers write their states themselves


def test_settings_of_the_drafter_that_are_overridden_are_logged(
    drafter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (drafter / "config.json").write_text(json.dumps({"rope_theta": 1e4, "rope_scaling": None}))

    def log_of(overrides: str) -> list[str]:
        caplog.clear()
        drafter_check._warn_of_overrides(
            drafter, SimpleNamespace(json_model_override_args=overrides)
        )
        return [record.message for record in caplog.records]

    assert log_of("{}") == []
    assert log_of('{"rope_theta": 10000.0}') == []
    (line,) = log_of('{"rope_theta": 2e6, "rope_scaling": {"type": "yarn"}}')
    assert "changes the drafter's rope_scaling, rope_theta too" in line


@pytest.mark.parametrize(("most", "refused"), [(512, True), (2048, False), (None, False)])
def test_a_drafter_has_as_many_positions_as_the_server(
    drafter: Path, monkeypatch: pytest.MonkeyPatch, most: int | None, refused: bool
) -> None:
    (drafter / "config.json").write_text(json.dumps({"max_position_embeddings": most}))
    target = SimpleNamespace(context_len=2048)
    monkeypatch.setattr(drafter_check.upstream, "model_config_of", lambda args: target)
    if not refused:
        drafter_check._require_positions(None, drafter)
        return
    with pytest.raises(DSparkError, match=r"knows 512 positions .* set --context-length 512"):
        drafter_check._require_positions(None, drafter)


def test_positions_and_overrides_are_looked_at_before_the_target(
    drafter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`_require_positions` and `_warn_of_overrides` have tests of their own."""
    called: list[str] = []
    for name in (
        "_check_moe", "_choose_mode", "_require_positions", "_warn_of_overrides", "_target",
        "_require_features", "validate_drafter", "_reads_confidence",
    ):  # fmt: skip
        monkeypatch.setattr(drafter_check, name, lambda *_, _name=name, **__: called.append(_name))
    args = SimpleNamespace(
        speculative_draft_model_path=str(drafter),
        model_path="target",
        speculative_dspark_block_size=None,
        speculative_num_draft_tokens=None,
    )
    (drafter / "config.json").write_text(json.dumps({"architectures": ["Qwen3DSparkModel"]}))
    drafter_check._check(None, args)
    assert called[2:5] == ["_require_positions", "_warn_of_overrides", "_target"]
