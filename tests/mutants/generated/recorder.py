"""Pytest plugin: which test ran which lines of the product, and how long each test took.

Loaded with `-p tests.mutants.generated.recorder`, in xdist's workers too; each process, and each
that a test starts, writes a data file of coverage.py into the folder that RECORD_VARIABLE names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import coverage
import pytest

from tests.mutants.generated.recorder_names import DATA, RECORD_VARIABLE, SECONDS

_seconds: dict[str, float] = {}
_folder = Path(os.environ[RECORD_VARIABLE])
_root = Path(__file__).resolve().parents[3]
_sources = [str(_root / each) for each in ("sglang_dspark", "loadtest")]
_recording = coverage.Coverage(
    data_file=str(_folder / f"{DATA}.{os.getpid()}"), source=_sources, config_file=False
)
# From here on, so that what runs as modules are imported is seen (by no test's name).
_recording.start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    context = quote(item.nodeid.split("@")[0])
    _recording.switch_context(context)
    _record_children(context)
    result = yield
    _recording.switch_context("")
    return result


def _record_children(context: str) -> None:
    """Have processes that this test starts record too (coverage.py's .pth file reads this)."""
    settings = _folder / f"settings.{os.getpid()}"
    lines = ["[run]", f"data_file = {_folder / DATA}", "parallel = true", "sigterm = true"]
    lines += ["patch = _exit"]  # multiprocessing ends its processes so
    lines += [f"context = {context}", "source =", *(f"    {each}" for each in _sources)]
    settings.write_text("\n".join(lines) + "\n", encoding="utf-8")
    os.environ["COVERAGE_PROCESS_START"] = str(settings)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    name = report.nodeid.split("@")[0]
    _seconds[name] = _seconds.get(name, 0.0) + report.duration


def pytest_sessionfinish() -> None:
    os.environ.pop("COVERAGE_PROCESS_START", None)  # no test ran in the first of several
    _recording.stop()
    _recording.save()
    (_folder / f"{SECONDS}.{os.getpid()}.json").write_text(json.dumps(_seconds), encoding="utf-8")
