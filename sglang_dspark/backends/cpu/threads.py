"""How many threads compute, and how they wait.

A step is a chain of short parallel regions; thread_pool.py shares out what is ours of it. OpenMP
threads, which torch has for the rest, would cost a whole scheduler slice (about 15 ms) per region
if they spun while a neighbour wants the core. A second compute thread on two cores competes with
the HTTP server and the detokenizer: 5 to 24% faster where nothing else runs, slower beside other
work. So the default leaves one core to the rest of the server and lets idle threads sleep. Several
ranks of one server share the other cores.
"""

from __future__ import annotations

import os

RANKS = "_SGLANG_DSPARK_RANKS"  # of this server on this machine, told to its processes


def available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads(cores: int, ranks: int = 1) -> int:
    """Compute threads of each rank for `cores` available ones: all but one, at least one.

    Raises ValueError for a count below 1.
    """
    if cores < 1 or ranks < 1:
        raise ValueError(f"at least one core and one rank, not {cores} and {ranks}")
    return max(1, (cores - 1) // ranks)


def chosen_threads() -> int:
    """The user's choice (`cpu.threads`, then OMP_NUM_THREADS) or the default."""
    from sglang_dspark.serving.config import current_config

    configured = current_config().cpu.threads
    if configured is not None:
        return configured
    named = os.environ.get("OMP_NUM_THREADS", "")
    if named.isdigit() and int(named) > 0:
        return int(named)
    return default_threads(available_cores(), int(os.environ.get(RANKS, "1")))


def set_environment_defaults() -> None:
    """Defaults for the processes SGLang will start; libgomp reads them when it is loaded."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def limit_this_process() -> int:
    """Set torch's thread count in a worker process; returns it."""
    import torch

    count = chosen_threads()
    torch.set_num_threads(count)
    return count
