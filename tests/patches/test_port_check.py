"""Test that a port in use, or one that cannot be listened on, is refused in one line."""

from __future__ import annotations

import socket

import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.ports import free_port, require_free_port
from tests.ports import free_ports


def test_a_free_port_passes_and_stays_free() -> None:
    port = free_ports()
    require_free_port("127.0.0.1", port)
    require_free_port("127.0.0.1", port)


def test_a_port_found_free_passes() -> None:
    require_free_port("127.0.0.1", free_port("127.0.0.1"))


def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(DSparkError, match=rf"cannot listen on 127\.0\.0\.1:{port} .*another"):
            require_free_port("127.0.0.1", port)
        with pytest.raises(DSparkError, match="Address already in use"):
            require_free_port("0.0.0.0", port)


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 70000), ("no.such.host.invalid", 80)])
def test_an_impossible_address_is_refused(host: str, port: int) -> None:
    with pytest.raises(DSparkError, match="cannot listen on"):
        require_free_port(host, port)
