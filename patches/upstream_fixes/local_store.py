"""The ranks' meeting point, at the address that they meet at alone.

Upstream: SGLang has its ranks, one too, meet at `tcp://127.0.0.1:…`, or those of several
machines at `--dist-init-addr`. torch's store behind it (torch/distributed/rendezvous.py,
`_create_c10d_store`) listens on every interface all the same, asks nobody who they are, and is read
and written by whoever connects.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sglang_dspark.patches.seam import Seam


def meet_locally(
    original: Callable[..., Any],
    hostname: str,
    port: int,
    rank: int,
    world_size: int,
    timeout: timedelta,
    use_libuv: bool = True,
) -> Any:
    """AROUND hook of `_create_c10d_store`: the store's listener is bound to `hostname` alone.

    What does not host a store is torch's own business; so is a name, which may have several
    addresses, an address that is not this machine's own (behind a translation of addresses), and a
    port that cannot be had, which may be this process's store for a second group.
    """
    listener = None
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)  # it hosts the store
    if rank == 0 and use_libuv and not agent and _is_address(hostname):
        listener = _listen(hostname, port)
    if listener is None:
        return original(hostname, port, rank, world_size, timeout, use_libuv)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        hostname,
        port,
        world_size,
        True,
        timeout,
        multi_tenant=True,
        use_libuv=True,
        master_listen_fd=listener.detach(),
    )


def _is_address(hostname: str) -> bool:
    try:
        return not ipaddress.ip_address(hostname).is_unspecified
    except ValueError:  # a name
        return hostname == "localhost"


def _listen(hostname: str, port: int) -> socket.socket | None:
    """A listening socket, or None where the port is taken or the address another machine's."""
    try:
        return socket.create_server(
            (hostname, port), family=socket.AF_INET6 if ":" in hostname else socket.AF_INET
        )
    except OSError:
        return None


SEAMS = (
    Seam(
        name="local-store",
        target="torch.distributed.rendezvous._create_c10d_store",
        kind="around",
        hook=meet_locally,
        signature="(hostname, port, rank, world_size, timeout, use_libuv=True)",
        why="torch opens an unguarded port on every interface, wherever the ranks meet",
    ),
)
