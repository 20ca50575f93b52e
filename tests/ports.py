"""Choose ports for tests that run in parallel: each test process has its own range.

A port that the kernel returns (`bind` to 0) is free only until another process gets it, and the
port after it may be in use. Our ranges are below the kernel's, so only a process that asks for a
port by number can get one.
"""

from __future__ import annotations

import os
import random

from sglang_dspark.errors import DSparkError
from sglang_dspark.ports import require_free_port

FIRST, STRETCH, STRETCHES = 16_000, 1_000, 16  # up to 32,000; Linux hands out from 32,768
HOST = "127.0.0.1"
_next = random.randrange(STRETCH)  # elsewhere each run, so that two runs seldom meet


def free_ports(count: int = 1) -> int:
    """The first of `count` free ports in a row, none of them given by an earlier call."""
    global _next
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % STRETCHES
    for _ in range(STRETCH):
        start = _next if _next + count <= STRETCH else 0
        _next = start + count
        ports = range(FIRST + worker * STRETCH + start, FIRST + worker * STRETCH + start + count)
        try:
            for port in ports:
                require_free_port(HOST, port)
        except DSparkError:  # in use
            continue
        return ports[0]
    raise AssertionError(f"no {count} free ports in a row for worker {worker}")
