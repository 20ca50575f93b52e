"""The GPU kit's proof of equal greedy answers sees faults of windows, KV slots, KV rows and tiers.

The very check of `tools/gpu/kit/attending.py`, on its servers, the scheduled one rehearsed as on
CUDA with captured graphs. Faults are planted in the server while it runs (`kv_faults.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_dspark.loadtest.servers.server import ServerProcess
from tests.integration.serving import START_TIMEOUT_S
from tests.rehearsal.conftest import SITE
from tests.rehearsal.kv_faults import FAULTS
from tools.gpu.kit.attending import agreement
from tools.gpu.kit.models import ATTENDING, ATTENDS, ready
from tools.gpu.kit.servers import server_of

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("attending")]

USERS = (1, 8, 48)
GRAPHS = ("1", "2", "4", "8", "16", "32", "48")  # requests


@dataclass
class Pair:
    """Two servers of one target, both frozen, and the file that plants a fault in the second."""

    plain: ServerProcess
    scheduled: ServerProcess
    model: Path
    fault: Path

    def rows(self, fault: str, *users: int) -> list[dict[str, Any]]:
        """Rows of the check under a fault; no KV row of an earlier call is left."""
        for server in (self.plain, self.scheduled):
            server.resume()
            httpx.post(f"{server.spec.url}/flush_cache", timeout=30.0).raise_for_status()
            server.pause()
        self.fault.write_text(fault)
        return list(agreement(self.plain, self.scheduled, self.model, users, "cpu"))


@contextmanager
def pair_of(folder: Path, attends: float) -> Iterator[Pair]:
    """Servers of the kit's arms `plain` and `dspark`, one after the other."""
    models = ready(folder, ATTENDING["cpu"], "cpu", attends)
    drafters, fault = {"dspark": models / "dspark"}, folder / "fault"
    plain, scheduled = (
        server_of(arm, models / "target", drafters, "cpu", USERS, folder)
        for arm in ("plain", "dspark")
    )
    config = folder / "overlap.yaml"
    config.write_text("cpu: {overlap: true}\n")
    world = {
        "PYTHONPATH": str(SITE),
        "SGLANG_DSPARK_CONFIG": str(config),
        "DSPARK_REHEARSAL": str(folder),
        "DSPARK_REHEARSAL_GRAPHS": "1",
        "DSPARK_REHEARSAL_STAIR": "1e-4",  # drafts pay at 48 users, too
        "DSPARK_REHEARSAL_FAULT": str(fault),
    }
    flags = (*scheduled.arguments, "--cuda-graph-bs-decode", *GRAPHS)
    scheduled = replace(scheduled, arguments=flags, environment=world)
    servers = [ServerProcess(spec, folder) for spec in (plain, scheduled)]
    try:
        for server in servers:
            server.start().wait_ready(START_TIMEOUT_S)
            server.pause()
        yield Pair(servers[0], servers[1], models / "target", fault)
    finally:
        for server in servers:
            server.stop()


@pytest.fixture(scope="module")
def attending(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with pair_of(tmp_path_factory.mktemp("attending"), ATTENDS) as pair:
        yield pair


@pytest.mark.slow
def test_a_target_that_says_its_table_is_blind(tmp_path: Path) -> None:
    """So `arms`, whose target is such a one, shows no fault of these. This test is the first: it
    has ended its servers before the others start theirs."""
    with pair_of(tmp_path, attends=0.0) as blind:
        for fault in FAULTS:
            for row in blind.rows(fault, *USERS):
                assert "failed" not in row, (fault, row)
                assert row["equal"] == row["requests"]


@pytest.mark.parametrize("users", USERS)
def test_without_a_fault_all_answers_are_plain_decodings(attending: Pair, users: int) -> None:
    [row] = attending.rows("", users)
    assert "failed" not in row, row
    assert (row["equal"], row["near_ties"]) == (row["requests"], 0)
    assert row["compared"] == row["tokens"] >= 16 * row["requests"]
    assert row["tau"] > 2
    assert min(row["accepted"], row["rejected"]) > 8 * row["requests"]


@pytest.mark.parametrize("users", [pytest.param(USERS, marks=pytest.mark.slow), (8,)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_tokens(attending: Pair, fault: str, users: tuple[int, ...]) -> None:
    for row in attending.rows(fault, *users):
        assert "answers are not plain decoding's" in row.get("failed", ""), row
        assert row["equal"] < 0.75 * row["requests"], row
