"""Test which of upstream's lines a CPU server's log drops, and which it keeps."""

from __future__ import annotations

import logging

import pytest

from sglang_dspark.backends.cpu import log_filters

LOADING = "Ignore import error when loading sglang.srt.models."
FLAT = "DSpark SPS table is uninitialized (flat): the verify budget degenerates to verify-all"


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    log_filters.install()
    log_filters.install()
    caplog.set_level(logging.INFO)
    return caplog


@pytest.mark.parametrize(
    ("reason", "kept"),
    [
        ("grok: '_OpNamespace' 'sgl_kernel' object has no attribute 'fused_moe_router_cpu'", False),
        ("inkling: No module named 'cutlass'", False),
        ("midashenglm: No module named 'torchaudio'", False),
        (
            "mamba: cannot import name 'causal_conv1d_fn' from "
            "'sglang.srt.layers.attention.mamba.mamba' (/x/mamba.py)",
            False,
        ),
        ("llama: No module named 'sglang.srt.layers.linear'", True),
        ("llama: name 'torch' is not defined", True),
        ("llama: cannot import name 'LlamaConfig' from 'transformers' (/x/__init__.py)", True),
    ],
)
def test_models_without_a_build_here(
    said: pytest.LogCaptureFixture, reason: str, kept: bool
) -> None:
    logging.getLogger(log_filters.MODELS).warning(LOADING + reason)
    assert bool(said.messages) is kept


def test_other_lines_and_other_loggers_stay(said: pytest.LogCaptureFixture) -> None:
    missing = LOADING + "inkling: No module named 'cutlass'"
    for name, line in (
        (log_filters.MODELS, "Model architectures ['Grok1'] are not supported for now."),
        (log_filters.PLANNER, "DSpark ragged-verify scheduler enabled (mode=compact)."),
        ("sglang.srt.multimodal_processor", missing),
        (f"{log_filters.MODELS}.more", missing),
    ):
        logging.getLogger(name).warning(line)
        assert said.messages[-1] == line


def test_upstreams_table_is_not_ours(said: pytest.LogCaptureFixture) -> None:
    logging.getLogger(log_filters.PLANNER).warning(FLAT)
    assert not said.messages


def test_debugging_shows_all(said: pytest.LogCaptureFixture) -> None:
    said.set_level(logging.DEBUG)
    logging.getLogger(log_filters.MODELS).warning(LOADING + "inkling: No module named 'cutlass'")
    logging.getLogger(log_filters.PLANNER).warning(FLAT)
    assert len(said.messages) == 2
