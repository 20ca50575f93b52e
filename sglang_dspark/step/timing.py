"""Time the steps, and name their stages in a profiler's trace (SGLang's /start_profile).

`dspark:step` is the launch of a decode step, with its stages within. `dspark:plan` and
`dspark:learn` are outside of it, and so is a plan that is made while another step computes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

PREFIX = "dspark:"
_NOTHING: AbstractContextManager[Any] = nullcontext()

Mark = Any  # a moment of a device's own time


class Clock(Protocol):
    """Set marks where work is launched; measure the time between two that have passed."""

    def mark(self) -> Mark:
        """Mark the moment when all work launched so far is done."""

    def seconds(self, begin: Mark, end: Mark) -> float | None:
        """Return the time between two marks; None if the later one has not passed. Never waits."""

    def lead(self) -> None:
        """Keep the device busy for a moment: later launches then wait for the device, not for the
        host, as in a server with overlap."""


class HostClock:
    """Time work that is done when its call returns: a CPU's."""

    def __init__(self, read: Callable[[], float]) -> None:
        """Read the time by `read`: seconds of the thread that computes."""
        self._read = read

    def mark(self) -> float:
        """Return the time now."""
        return self._read()

    def seconds(self, begin: float, end: float) -> float:
        """Return the difference."""
        return end - begin

    def lead(self) -> None:
        """Return at once: this device queues no work."""


def span(stage: str) -> AbstractContextManager[Any]:
    """Name the enclosed work `dspark:STAGE` in a trace; without a profiler only a flag is read."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return torch.profiler.record_function(f"{PREFIX}{stage}")
    return _NOTHING
