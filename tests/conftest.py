"""Options of the test run, and what `dspark doctor --json` says, asked once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# `--hypothesis-profile=thorough`: 10,000 examples of each property (tests/schedule/properties.py)
settings.register_profile("tests", deadline=None)  # a busy machine stalls
settings.load_profile("tests")
settings.register_profile("thorough", max_examples=10_000, deadline=None)

# They wait more than they compute: one worker has them all, and the others have the processors.
LOAD_TESTS = Path(__file__).with_name("loadtest")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--drafter",
        metavar="DIR",
        help="drafter that the server tests use for the demo target, instead of the shipped one",
    )
    parser.addoption("--slow", action="store_true", help="run the tests marked slow as well")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own call of this hook
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "doctor_report" in getattr(item, "fixturenames", ()):  # one process asks for all
            item.add_marker(pytest.mark.xdist_group("doctor"))
        elif LOAD_TESTS in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("loadtest"))
        elif item.get_closest_marker("xdist_group") is None and _shares_a_fixture(item):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    if config.getoption("--slow"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="needs --slow"))


def _shares_a_fixture(item: pytest.Item) -> bool:
    """Return whether a fixture is made once for the module; two workers would make it twice."""
    if not isinstance(item, pytest.Function):
        return False
    used = item._fixtureinfo.name2fixturedefs
    return any(fixtures[-1].scope == "module" for fixtures in used.values())


def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that starts servers of its own finds no others in memory."""
    names = getattr(item, "fixturenames", ())
    if item.get_closest_marker("server") and "pool" not in names:
        from tests.integration.serving import POOLS

        for pool in POOLS:
            pool.put_all_away()


@pytest.fixture(scope="session")
def doctor_report() -> dict[str, Any]:
    """JSON of `dspark doctor --json` in a fresh process, where plugins are really loaded."""
    done = subprocess.run(
        [sys.executable, "-m", "sglang_dspark.cli.main", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    report = json.loads(done.stdout)  # fails when anything else is on stdout
    assert done.returncode == 0, report["problems"]
    return report
