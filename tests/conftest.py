"""Options of the test run."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--drafter",
        metavar="DIR",
        help="drafter that the server tests use for the demo target, instead of the shipped one",
    )
