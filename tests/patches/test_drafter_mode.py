"""Test that SGLang builds what scheduling by confidence needs, before the models load."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

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
