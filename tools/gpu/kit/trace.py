"""Analyse a profiler's trace of decode steps: time of the host by stage, gaps on the device.

SGLang writes a trace after /start_profile (torch's profiler, Chrome's format, gzip). The stages are
those of `step/timing.py`. Recording itself uses time of the host, so its figures are upper bounds.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from sglang_dspark.errors import DSparkError
from sglang_dspark.step.timing import PREFIX

STEP = "step"
THEIRS = ("draft", "verify", "accept", "commit")  # stages whose time is in SGLang's calls
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_HEAD = "markov"  # in the names of the sequential head's kernels, ours and SGLang's
_SHOWN = 12


@dataclass(frozen=True)
class Event:
    """A span. name: of a kernel or stage. begin, end: microseconds."""

    name: str
    begin: float
    end: float

    @property
    def us(self) -> float:
        """Compute the duration in us."""
        return self.end - self.begin


@dataclass(frozen=True)
class Trace:
    """Spans ordered by begin. device: kernels, copies and fills; host: our stages."""

    device: tuple[Event, ...]
    host: tuple[Event, ...]

    def of(self, stage: str) -> list[Event]:
        """Return the spans of a stage."""
        return [event for event in self.host if event.name == stage]


def read_trace(path: Path) -> Trace:
    """Read a trace. Raises DSparkError if the file is invalid or has no step of ours."""
    try:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        device = _events(each for each in events if each.get("cat") in _DEVICE)
        marked = [each for each in events if each.get("cat") == "user_annotation"]
        ours = [each for each in marked if str(each["name"]).startswith(PREFIX)]
        host = _events({**each, "name": each["name"].removeprefix(PREFIX)} for each in ours)
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise DSparkError(f"{path} is no trace ({type(error).__name__}); profile again") from None
    began = [event.begin for event in host if event.name == STEP]
    if not began:
        raise DSparkError(f"{path} has no step of ours; is the server scheduled?")
    # The prefill before the first decode step is in no step.
    return Trace(tuple(each for each in device if each.begin >= min(began)), host)


def summary(trace: Trace) -> dict[str, Any]:
    """Compute the JSON figures of a step, times in microseconds."""
    steps = trace.of(STEP)
    stages = sorted({event.name for event in trace.host})
    period = [b.begin - a.begin for a, b in pairwise(steps)]
    return {
        "steps": len(steps),
        "period_us": median(period) if period else None,
        "host_us": {name: median(event.us for event in trace.of(name)) for name in stages},
        "ours_us": ours(trace),
        **device_figures(trace.device, len(steps)),
    }


def ours(trace: Trace) -> float:
    """Compute the host time in us that our code uses in a step.

    It is the median launch without SGLang's calls, plus the mean of planning and learning outside
    of launches."""
    theirs = [event for name in THEIRS for event in trace.of(name)]
    steps = trace.of(STEP)
    launches = [step.us - sum(each.us for each in theirs if within(each, step)) for step in steps]
    apart = sum(event.us for name in ("plan", "learn") for event in outside(trace, name))
    return median(launches) + apart / len(steps)


def within(event: Event, step: Event) -> bool:
    """Return whether an event is within a step's launch."""
    return step.begin <= event.begin and event.end <= step.end


def outside(trace: Trace, stage: str) -> list[Event]:
    """List the spans of a stage outside of step launches, whose time includes the other spans."""
    steps = trace.of(STEP)
    return [event for event in trace.of(stage) if not any(within(event, step) for step in steps)]


def device_figures(events: Sequence[Event], steps: int) -> dict[str, Any]:
    """Compute busy and waiting times of the device; nulls without events, as on a CPU."""
    if not events:
        return {"device_busy_share": None, "waits_us": None, "longest_wait_us": None, "kernels": {}}
    merged = busy(events)
    waits = [b[0] - a[1] for a, b in pairwise(merged)]
    whole = merged[-1][1] - merged[0][0]
    spent: Counter[str] = Counter()
    for event in events:
        spent[event.name] += event.us  # type: ignore[assignment]
    head = sum(us for name, us in spent.items() if _HEAD in name.lower())
    return {
        "device_busy_share": 1 - sum(waits) / whole if whole else None,
        "waits_us": sum(waits) / steps,
        "longest_wait_us": max(waits, default=0.0),
        "head_share": head / whole if whole else None,
        "kernels": {name[:100]: us / steps for name, us in spent.most_common(_SHOWN)},
    }


def busy(events: Sequence[Event]) -> list[tuple[float, float]]:
    """Merge the times when at least one event ran on any stream, in order."""
    merged: list[tuple[float, float]] = []
    for event in events:
        if merged and event.begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], event.end))
        else:
            merged.append((event.begin, event.end))
    return merged


def _events(found: Iterable[Any]) -> tuple[Event, ...]:
    made = [
        Event(str(each["name"]), float(each["ts"]), float(each["ts"]) + float(each["dur"]))
        for each in found
        if each.get("ph") == "X"
    ]
    return tuple(sorted(made, key=lambda event: event.begin))
