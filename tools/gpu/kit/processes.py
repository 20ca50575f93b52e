"""Run jobs in parallel processes with a time limit.

Compiling a variant of a kernel takes seconds of a core, and other processes read the compiled
kernel from Triton's cache on disk.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import get_context
from typing import TypeVar

T = TypeVar("T")


def run_together(
    jobs: Mapping[str, Callable[[], T]], processes: int, seconds: float
) -> Iterator[tuple[str, T | BaseException]]:
    """Yield each job's name with its result or exception as soon as it ends.

    jobs: picklable calls, started in their order. After `seconds`, or when the caller stops, all
    processes are killed; each unfinished job is yielded with a TimeoutError.
    """
    ended: queue.SimpleQueue[tuple[str, T | BaseException]] = queue.SimpleQueue()
    deadline, left = time.monotonic() + seconds, list(jobs)
    with get_context("spawn").Pool(min(processes, max(1, len(jobs)))) as pool:
        for name, job in jobs.items():

            def put(found: T | BaseException, name: str = name) -> None:
                ended.put((name, found))

            pool.apply_async(job, callback=put, error_callback=put)
        while left:
            try:
                # A killed process reports nothing: the deadline ends the wait for it too.
                found = ended.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                break
            left.remove(found[0])
            yield found
    for name in left:
        yield name, TimeoutError(f"not done within {seconds:.0f} s")
