"""Pytest plugin: which test ran which lines of the product, and how long each test took.

Loaded with `-p tests.mutants.generated.recorder`, in xdist's workers too; each process writes a
data file of coverage.py and its seconds into the folder that RECORD_VARIABLE names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

from tests.mutants.generated.recorder_names import DATA, RECORD_VARIABLE, SECONDS

_seconds: dict[str, float] = {}
_folder = Path(os.environ[RECORD_VARIABLE])
_root = Path(__file__).resolve().parents[3]
_recording = coverage.Coverage(
    data_file=str(_folder / f"{DATA}.{os.getpid()}"),
    source=[str(_root / each) for each in ("sglang_dspark", "loadtest")],
    config_file=False,
)
# From here on, so that what runs as modules are imported is seen (by no test's name).
_recording.start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _recording.switch_context(item.nodeid.split("@")[0])
    result = yield
    _recording.switch_context("")
    return result


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid.split("@")[0]
    _seconds[name] = _seconds.get(name, 0.0) + report.duration


def pytest_sessionfinish() -> None:
    _recording.stop()
    _recording.save()
    (_folder / f"{SECONDS}.{os.getpid()}.json").write_text(json.dumps(_seconds), encoding="utf-8")
