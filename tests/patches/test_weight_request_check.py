"""Weight updates that cannot be loaded: refused in one line before the schedulers get them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_dspark.patches.upstream_fixes import weight_request_check
from tests.patches.hooked import put_in


class SentError(Exception):
    """The request went on to the schedulers."""


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Any:
    put_in(monkeypatch, weight_request_check.SEAMS)
    found: Any = object.__new__(TokenizerManager)
    config = SimpleNamespace(architectures=["LlamaForCausalLM"])
    found.model_config = SimpleNamespace(hf_config=config)

    def send() -> None:
        raise SentError

    found.auto_create_handle_loop = send
    return found


def model(folder: Path, architecture: str) -> str:
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    return str(folder)


def update(manager: Any, path: str, load_format: str | None = None) -> Any:
    asked = UpdateWeightFromDiskReqInput(model_path=path, load_format=load_format)
    return asyncio.run(manager.update_weights_from_disk(asked))


@pytest.mark.parametrize("load_format", ["nope", "", "gguf", "remote"])
def test_a_format_that_raises_is_refused(manager: Any, tmp_path: Path, load_format: str) -> None:
    success, message, _ = update(manager, model(tmp_path, "LlamaForCausalLM"), load_format)
    assert not success
    assert message.startswith(f"load_format {load_format!r} is not one of auto, safetensors")


def test_a_drafter_is_refused(manager: Any, tmp_path: Path) -> None:
    success, message, _ = update(manager, model(tmp_path, "Qwen3DSparkModel"))
    assert not success
    assert "Qwen3DSparkModel" in message
    assert "a new drafter needs a restart" in message


@pytest.mark.parametrize("load_format", [None, "auto", "safetensors", "pt"])
def test_the_targets_weights_go_on(manager: Any, tmp_path: Path, load_format: str | None) -> None:
    with pytest.raises(SentError):
        update(manager, model(tmp_path, "LlamaForCausalLM"), load_format)


@pytest.mark.parametrize("config", ["", "[]", "{}", None])
def test_a_folder_that_names_no_architecture_goes_on(
    manager: Any, tmp_path: Path, config: str | None
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(SentError):
        update(manager, str(tmp_path))
