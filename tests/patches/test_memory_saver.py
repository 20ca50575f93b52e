"""--enable-memory-saver without its package: one line before anything is loaded."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

from sglang_dspark.patches.upstream_fixes.start_checks import check_start
from tests.ports import free_ports


def server_args(*, memory_saver: bool) -> SimpleNamespace:
    return SimpleNamespace(enable_memory_saver=memory_saver, host=None, port=free_ports())


def test_a_missing_package_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        check_start(server_args(memory_saver=True), [])
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert "needs the package torch-memory-saver" in told[0]
    check_start(server_args(memory_saver=False), [])


def test_with_the_package_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    check_start(server_args(memory_saver=True), [])
