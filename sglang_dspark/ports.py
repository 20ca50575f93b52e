"""Check whether a server can listen at an address, and find a free port."""

from __future__ import annotations

import socket

from sglang_dspark.errors import DSparkError


def require_free_port(host: str, port: int) -> None:
    """Raise DSparkError unless a listener could be bound to `host`:`port` now.

    Binds like the HTTP server (SO_REUSEADDR), so a port in TIME_WAIT counts as free.
    """
    if not 0 <= port <= 65535:  # getaddrinfo would take it modulo 65536
        raise DSparkError(f"cannot listen on {host}:{port} (no such port); check --port")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise DSparkError(
            f"cannot listen on {host}:{port} ({error}); check --host and --port"
        ) from error
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise DSparkError(
                f"cannot listen on {host}:{port} ({error.strerror}); stop what uses it or choose "
                "another --port"
            ) from error


def free_port(host: str) -> int:
    """Return a port of `host` that nothing listens on now, chosen by the kernel."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
