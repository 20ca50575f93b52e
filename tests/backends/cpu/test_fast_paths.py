"""Test that a fast path that is off logs its reason once."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from sglang_dspark.backends.cpu import csrc, fast_paths, linear
from sglang_dspark.backends.cpu.fast_paths import find_or_log, require, supported


@pytest.fixture
def log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(fast_paths, "_logged", set())
    caplog.set_level(logging.INFO, logger="sglang_dspark")
    return caplog


def test_a_reason_is_logged_once_and_another_one_too(log: pytest.LogCaptureFixture) -> None:
    def one_rank(ranks: int) -> bool:
        return supported("short pass", lambda: require(ranks == 1, f"{ranks} ranks"))

    assert [one_rank(ranks) for ranks in (1, 2, 2, 3, 1)] == [True, False, False, False, True]
    said = ["sglang-dspark: off: short pass: 2 ranks", "sglang-dspark: off: short pass: 3 ranks"]
    assert log.messages == said


def test_what_was_found_is_handed_on_and_other_errors_are_raised(
    log: pytest.LogCaptureFixture,
) -> None:
    assert find_or_log("path", lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        find_or_log("path", lambda: 1 // 0)
    assert log.messages == []


def test_a_processor_without_fused_multiply_add_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csrc, "library", lambda: SimpleNamespace(dspark_processor=lambda: 0))
    assert linear.why_not() == "this processor has no AVX2 and fused multiply-add"
