"""Time operators on a CUDA device: in captured graphs, as a server replays them, or eagerly.

Every replay starts with a second-level cache full of other data, as in the middle of a step.
Other implementations (peers) are imported when they are timed. A peer that is not installed,
refuses a shape or cannot be captured yields a row with the reason and without a time.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

REPEATS = 30
LEAST = 5  # repeats, however long a call takes
SECONDS = 0.25  # of repeats of one call, beyond the least
_FLUSH = 256 * 2**20  # bytes; more than any second-level cache
OURS = "ours"  # first word of our implementations' names

Call = Callable[[], object]
Row = dict[str, Any]


@dataclass(frozen=True)
class Candidate:
    """One implementation of an operator on one shape.

    shape: as printed in the row. case: the variant of the operator. make: prepares the call on the
    device, outside of the time. eager: also time the call with the host's launches, for operators
    that a server launches outside of graphs. memory: also measure the peak of allocated memory.
    """

    op: str
    shape: Sequence[int | str]
    case: str
    implementation: str
    make: Callable[[], Call]
    eager: bool = False
    memory: bool = False

    @property
    def ours(self) -> bool:
        """Return whether the implementation is this package's."""
        return self.implementation.startswith(OURS)


def microseconds(call: Call, *, graph: bool = True) -> float:
    """Return a call's median time in microseconds between CUDA events; the cache is flushed first.

    graph: replay a captured graph, without launches of the host; False: call eagerly.
    Raises the call's exception, and RuntimeError where it cannot be captured.
    """
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    run = captured(call) if graph else call
    flush = torch.empty(_FLUSH, dtype=torch.uint8, device="cuda")
    times: list[float] = []
    began = time.monotonic()
    while len(times) < LEAST or (len(times) < REPEATS and time.monotonic() - began < SECONDS):
        flush.zero_()
        if not graph:
            torch.cuda.synchronize()  # else the host launches while the device still flushes
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def captured(call: Call) -> Call:
    """Capture a call, which ran before, in a CUDA graph; the result replays it.

    Raises RuntimeError where the call waits for the device. A failed capture can break the
    process's CUDA state (torch's own tests of it run in a subprocess), so the call first runs once
    more with synchronisation forbidden.
    """
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def peak_bytes(call: Call) -> int:
    """Return the peak memory of one eager call, above that in use before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def timed(candidate: Candidate) -> Row:
    """Time a candidate: `{op, shape, case, implementation, us}`, optionally `eager_us`, `bytes`.

    us is null, with the `reason`, where the implementation raises or cannot be captured.
    """
    row: Row = {
        "op": candidate.op,
        "shape": list(candidate.shape),
        "case": candidate.case,
        "implementation": candidate.implementation,
    }
    try:
        call = candidate.make()
        if candidate.memory:
            row["bytes"] = peak_bytes(call)
        if candidate.eager:
            row["eager_us"] = microseconds(call, graph=False)
        row["us"] = microseconds(call)
    except Exception as error:
        row |= {"us": None, "reason": f"{type(error).__name__}: {error}"[:200]}
    return row


def timed_all(candidates: Iterable[Candidate]) -> Iterator[Row]:
    """Time candidates one after the other; memory is returned to the device in between."""
    for candidate in candidates:
        yield timed(candidate)
        torch.cuda.empty_cache()


def print_rows(candidates: Callable[[], Iterable[Candidate]]) -> None:
    """Print a JSON row for each candidate when it is timed, or that there is no CUDA device."""
    if not torch.cuda.is_available():
        print("no CUDA device here: this benchmark measures nothing on a CPU")
        return
    for row in timed_all(candidates()):
        print(json.dumps(row), flush=True)
