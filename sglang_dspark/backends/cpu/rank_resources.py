"""Give several CPU ranks the cores, memory and network that SGLang lets the user set.

Upstream: sglang/srt/utils/numa_utils.py (`init_threads_binding`) refuses more ranks than
the machine has memory nodes unless a variable gives each one cores; kv_cache_configurator.py gives
a rank the memory of its whole node; gloo listens where the machine's own name resolves to, and the
queue between machines (shm_broadcast.py) at the address on the route to one of Google's name
servers, or at no reachable address. Variables that the user sets stay unchanged.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import psutil

from sglang_dspark.backends.cpu import threads
from sglang_dspark.serving import upstream

CORES = "SGLANG_CPU_OMP_THREADS_BIND"
INTERFACE = "GLOO_SOCKET_IFNAME"
ADDRESS = "SGLANG_HOST_IP"
# Fraction of a node's free memory for weights and caches. SGLang has a rule, but if cores are
# set it uses 0.95 of the whole node for each rank.
STATIC_MEMORY = 0.8
_ours: dict[str, str] = {}  # set by this process: its next engine may need other values


def ranks_of(server_args: Any) -> tuple[int, int]:
    """Count the compute processes of the server, and those of them on this machine.

    Data-parallel replicas are separate processes, except with DP attention only.
    """
    replicas = 1 if server_args.enable_dp_attention else server_args.dp_size
    everywhere = replicas * server_args.tp_size * server_args.pp_size
    return everywhere, max(1, everywhere // server_args.nnodes)


def prepare(server_args: Any) -> None:
    """Set variables for the server's processes and its memory share, before they are spawned."""
    everywhere, here = ranks_of(server_args)
    os.environ[threads.RANKS] = str(here)
    _choose_network(server_args.dist_init_addr if server_args.nnodes > 1 else None)
    if everywhere == 1 or everywhere <= (nodes := memory_nodes()):
        return
    _set(CORES, "|".join(core_shares(sorted(os.sched_getaffinity(0)), here)))
    if server_args.mem_fraction_static is None:
        together = -(-here // nodes)
        server_args.mem_fraction_static = round(STATIC_MEMORY / together, 3)


def core_shares(cores: Sequence[int], ranks: int) -> list[str]:
    """Split cores among ranks, as `0,1,2`: neighbours, in even shares.

    With fewer cores than ranks some ranks share a core."""
    count = len(cores)
    bounds = [rank * count // ranks for rank in range(ranks + 1)]
    parts = [cores[low : max(high, low + 1)] for low, high in pairwise(bounds)]
    return [",".join(map(str, part)) for part in parts]


def _set(name: str, value: str) -> None:
    """Set a variable, unless the user has set it."""
    if os.environ.get(name, "") in ("", _ours.get(name)):
        os.environ[name] = _ours[name] = value


def memory_nodes() -> int:
    """Count the machine's memory nodes, at least one."""
    return max(1, len(upstream.get_cpu_ids_by_node()))


def _choose_network(rendezvous: str | None) -> None:
    """Use the network of the rendezvous `HOST:PORT`; loopback without one.

    Sets nothing where it has no route: connecting to it reports the error.
    """
    host = "127.0.0.1"
    if rendezvous is not None:
        host = upstream.NetworkAddress.parse(rendezvous).host
    own = _own_address(host)
    if own is None:
        return
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address.partition("%")[0] == own for each in addresses):
            _set(INTERFACE, name)
    if rendezvous is not None and not os.environ.get("HOST_IP"):
        _set(ADDRESS, own)


def _own_address(host: str) -> str | None:
    """Return this machine's address on the route to a host, without sending a packet."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return None
