"""One machine's ranks meet on loopback; what is not of one machine alone stays torch's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import _create_c10d_store

from sglang_dspark.patches.upstream_fixes.local_store import meet_locally
from tests.ports import free_ports

TIMEOUT = timedelta(seconds=20)


def listening(port: int) -> set[str]:
    """Addresses at which this process listens on a port."""
    found = psutil.Process().net_connections()
    return {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN and c.laddr.port == port}


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_ranks_of_one_machine_meet_on_loopback(name: str) -> None:
    """The host waits for its guest."""
    port = free_ports()
    with ThreadPoolExecutor() as threads:
        ranks = (
            threads.submit(meet_locally, _create_c10d_store, name, port, rank, 2, TIMEOUT)
            for rank in range(2)
        )
        host, guest = [each.result() for each in list(ranks)]
    assert listening(port) == {"127.0.0.1"}
    guest.set("said", "by the guest")
    assert host.get("said") == b"by the guest"


def test_torch_itself_listens_everywhere() -> None:
    """Were it otherwise, there would be nothing to patch."""
    port = free_ports()
    store = _create_c10d_store("127.0.0.1", port, 0, 1, TIMEOUT)
    assert listening(port) & {"::", "0.0.0.0"}
    del store


def test_a_second_group_shares_the_store_of_the_first() -> None:
    port = free_ports()
    first = meet_locally(_create_c10d_store, "127.0.0.1", port, 0, 1, TIMEOUT)
    second = meet_locally(_create_c10d_store, "127.0.0.1", port, 0, 1, TIMEOUT)
    first.set("said", "once")
    assert second.get("said") == b"once"


@pytest.mark.parametrize(
    ("host", "rank", "libuv", "agent"),
    [
        ("10.0.0.1", 0, True, ""),
        ("node-0", 0, True, ""),
        ("0.0.0.0", 0, True, ""),
        ("127.0.0.1", 1, True, ""),
        ("127.0.0.1", 0, False, ""),
        ("127.0.0.1", 0, True, "True"),
    ],
)
def test_what_is_not_of_this_machine_alone_stays_torchs(
    monkeypatch: pytest.MonkeyPatch, host: str, rank: int, libuv: bool, agent: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    asked: list[Any] = []
    port = free_ports()
    result = meet_locally(lambda *a: asked.append(a), host, port, rank, 2, TIMEOUT, libuv)
    assert result is None
    assert asked == [(host, port, rank, 2, TIMEOUT, libuv)]
    assert listening(port) == set()


def test_the_store_is_torchs() -> None:
    store = meet_locally(_create_c10d_store, "127.0.0.1", free_ports(), 0, 1, TIMEOUT)
    assert isinstance(store, TCPStore)
