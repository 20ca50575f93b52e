"""Pytest plugin of a run on a copy: which tests failed, and whether the copy is what ran.

Loaded with `-p tests.mutants.report`; writes JSON to the file that REPORT_VARIABLE names.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

REPORT_VARIABLE = "DSPARK_MUTANT_REPORT"
_failed: list[str] = []
_passed: list[str] = []


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _failed.append(report.nodeid)
    elif report.when == "call" and report.passed:
        _passed.append(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    root = session.config.rootpath.resolve()
    foreign = [file for file in _files_of_ours() if not file.resolve().is_relative_to(root)]
    told = {"failed": _failed, "passed": len(_passed), "foreign": [str(file) for file in foreign]}
    Path(os.environ[REPORT_VARIABLE]).write_text(json.dumps(told), encoding="utf-8")


def _files_of_ours() -> list[Path]:
    """Files of our modules that this process has imported."""
    modules = [
        module
        for name, module in list(sys.modules.items())
        if name.split(".")[0] in ("sglang_dspark", "tests")
    ]
    return [Path(file) for module in modules if (file := getattr(module, "__file__", None))]
