"""Assign cores so that the load generator keeps time and every arm has the same ones.

Four cores or more: the generator has the last one for itself and the servers have the others.
Fewer: a separate core would cost the server half of a small machine, so all are shared. The
generator needs a few percent of one and has priority over the servers: real-time priority if the
system permits it, else a negative nice value (late by up to a slice of the OS scheduler). Its lag
is measured in every cell either way.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Literal

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.sweep.run_dir import Cores

FRONT = -10
_SPLIT_FROM = 4
_SHARED = "too few cores to give one away: shared, the load generator before the servers"


def assign_cores(policy: Literal["auto", "shared", "split"]) -> Cores:
    """Assign this machine's cores to servers and generator.

    Raises DSparkError if `policy` is `split` and there is only one core, or no affinity.
    """
    usable = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if policy == "split" and len(usable) < 2:
        raise DSparkError("cores: split needs two cores on Linux; use shared")
    if policy == "split" or (policy == "auto" and len(usable) >= _SPLIT_FROM):
        return Cores(
            server=usable[:-1],
            client=usable[-1:],
            nice=0,
            why="the load generator has a core of its own",
        )
    for shared in (
        Cores(server=usable, client=usable, nice=0, why=f"{_SHARED} (real-time)", realtime=True),
        Cores(server=usable, client=usable, nice=FRONT, why=f"{_SHARED} (nice {FRONT})"),
    ):
        if _permitted(shared):
            return shared
    return Cores(
        server=usable,
        client=usable,
        nice=0,
        why="too few cores to give one away: shared; a higher priority was not permitted",
    )


def _permitted(cores: Cores) -> bool:
    """Return whether the system permits these cores and priorities, tried on an idle child."""
    child = subprocess.Popen(
        [sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        cores.apply(child.pid)
    except (OSError, AttributeError):  # not permitted, or a system without it
        return False
    else:
        return True
    finally:
        child.kill()
        child.communicate()
