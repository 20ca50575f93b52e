"""Test what a server of several ranks sets for its processes: cores, threads, memory, interface."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace

import psutil
import pytest

pytest.importorskip("sglang")

from sglang_dspark.backends.cpu import rank_resources, threads
from sglang_dspark.backends.cpu.rank_resources import (
    ADDRESS,
    CORES,
    INTERFACE,
    core_shares,
    ranks_of,
)


@dataclass
class Arguments:
    """The fields of SGLang's `ServerArgs` that are read and set."""

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    nnodes: int = 1
    dist_init_addr: str | None = None
    enable_dp_attention: bool = False
    mem_fraction_static: float | None = None


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores at one memory; nothing set by anybody."""
    for name in (ADDRESS, CORES, INTERFACE, threads.RANKS, "HOST_IP", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "")  # so that what is set below is undone
        os.environ.pop(name)
    monkeypatch.setattr(rank_resources, "_ours", {})
    monkeypatch.setattr(rank_resources, "memory_nodes", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {*range(8)})


def prepared(**changed: object) -> Arguments:
    arguments = replace(Arguments(), **changed)  # type: ignore[arg-type]
    rank_resources.prepare(arguments)
    return arguments


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [
        ([0, 1], 2, ["0", "1"]),
        ([0, 1, 2, 3], 2, ["0,1", "2,3"]),
        ([4, 5, 8, 9, 11], 2, ["4,5", "8,9,11"]),
        ([0, 1], 4, ["0", "0", "1", "1"]),
        ([3], 2, ["3", "3"]),
    ],
)
def test_cores_are_shared(cores: list[int], ranks: int, expected: list[str]) -> None:
    assert core_shares(cores, ranks) == expected


def test_replicas_and_stages_are_processes_and_attentions_replicas_are_not() -> None:
    assert ranks_of(Arguments(tp_size=2, pp_size=2, dp_size=3, nnodes=2)) == (12, 6)
    assert ranks_of(Arguments(tp_size=4, dp_size=4, enable_dp_attention=True)) == (4, 4)


def test_one_rank_has_the_machine() -> None:
    arguments = prepared()
    assert CORES not in os.environ
    assert arguments.mem_fraction_static is None
    assert threads.chosen_threads() == 7


@pytest.mark.parametrize("kind", ["tp_size", "dp_size"])
def test_ranks_share_it(kind: str) -> None:
    arguments = prepared(**{kind: 2})
    assert os.environ[CORES] == "0,1,2,3|4,5,6,7"
    assert threads.chosen_threads() == 3
    assert arguments.mem_fraction_static == pytest.approx(rank_resources.STATIC_MEMORY / 2)


def test_a_rank_of_a_machine_has_all_of_it() -> None:
    arguments = prepared(tp_size=2, nnodes=2, dist_init_addr="127.0.0.1:20000")
    assert os.environ[CORES] == "0,1,2,3,4,5,6,7"
    assert threads.chosen_threads() == 7
    assert arguments.mem_fraction_static == rank_resources.STATIC_MEMORY


def test_a_memory_each_is_sglangs_own_business(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_resources, "memory_nodes", lambda: 2)
    arguments = prepared(tp_size=2)
    assert CORES not in os.environ
    assert arguments.mem_fraction_static is None
    assert prepared(tp_size=4).mem_fraction_static == pytest.approx(
        rank_resources.STATIC_MEMORY / 2
    )


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {CORES: "0|7", INTERFACE: "eth9", "OMP_NUM_THREADS": "2"}.items():
        monkeypatch.setenv(name, value)
    arguments = prepared(tp_size=2, mem_fraction_static=0.3)
    assert (os.environ[CORES], os.environ[INTERFACE]) == ("0|7", "eth9")
    assert arguments.mem_fraction_static == 0.3
    assert threads.chosen_threads() == 2


def test_the_next_engine_of_a_process_has_its_own() -> None:
    prepared(tp_size=2)
    prepared(tp_size=4)
    assert os.environ[CORES] == "0,1|2,3|4,5|6,7"
    prepared()
    assert threads.chosen_threads() == 7


def test_ranks_of_one_machine_meet_on_loopback() -> None:
    prepared(tp_size=2)
    addresses = psutil.net_if_addrs()[os.environ[INTERFACE]]
    assert "127.0.0.1" in {each.address for each in addresses}
    assert ADDRESS not in os.environ


def test_ranks_of_several_meet_where_the_meeting_point_is() -> None:
    """At the interface that has its address, and by that address."""
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family.name == "AF_INET":
                prepared(nnodes=2, tp_size=2, dist_init_addr=f"{each.address}:20000")
                assert (os.environ[INTERFACE], os.environ[ADDRESS]) == (name, each.address)


def test_no_way_there_is_left_to_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    prepared(nnodes=2, tp_size=2, dist_init_addr="node-0:20000")
    assert not {INTERFACE, ADDRESS} & os.environ.keys()
