"""The dry run of the GPU kit, made once for the tests of its group."""

from __future__ import annotations

from typing import Any

import pytest

from tests.tools.kit_runs import ALONE, dry_run


@pytest.fixture(scope="session")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Results of all stages that start no server, by name."""
    return dry_run(tmp_path_factory.mktemp("kit") / "out", *ALONE)
