"""Ports for tests that run side by side: each test process draws from a stretch of its own.

A port that the kernel hands out (`bind` to 0) is free only until another process gets it, and a
second port beside it was never promised. These lie below the kernel's range, so only somebody who
asks for one by number can have it.
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
