"""Bind the TCP store of the ranks' rendezvous only to the address of the rendezvous.

Upstream: SGLang's ranks, even a single one, meet at `tcp://127.0.0.1:…`, or on several
machines at `--dist-init-addr`. torch's store there (torch/distributed/rendezvous.py,
`_create_c10d_store`) listens on every interface, without authentication: any client can read and
write it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from sglang_dspark.patches.seam import Seams

SEAMS = Seams()


@SEAMS.around(
    "local-store",
    "torch.distributed.rendezvous._create_c10d_store",
    why="torch opens an unguarded port on every interface, wherever the ranks meet",
    issue="https://github.com/pytorch/pytorch/issues/173909",
    drop_when="torch binds a TCPStore to the address of the rendezvous alone",
)
def meet_locally(
    original: Callable[..., Any],
    hostname: str,
    port: int,
    rank: int,
    world_size: int,
    timeout: timedelta,
    use_libuv: bool = True,
) -> Any:
    """Bind the store's listener only to `hostname` (AROUND hook of `_create_c10d_store`).

    torch's own function runs if this process hosts no store, or if `_listen` opens no socket.
    """
    listener = None
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)  # the agent hosts the store
    if rank == 0 and use_libuv and not agent:
        listener = _listen(hostname, port)
    if listener is None:
        return original(hostname, port, rank, world_size, timeout, use_libuv)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    file = listener.detach()
    return TCPStore(
        hostname, port, world_size, True, timeout, multi_tenant=True, master_listen_fd=file
    )


def _listen(hostname: str, port: int) -> socket.socket | None:
    """Open a listening socket; None if `hostname` is no single address of this machine.

    A name may have several addresses, another machine's is known here by address translation. None
    too if the port is in use, perhaps by this process's store for a second group.
    """
    family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
    try:
        if hostname != "localhost" and ipaddress.ip_address(hostname).is_unspecified:
            return None
        return socket.create_server((hostname, port), family=family)
    except (ValueError, OSError):  # ValueError: a name
        return None
