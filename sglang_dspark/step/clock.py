"""What a step's time is measured by: marks set while it is launched, read when it has landed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

Mark = Any  # a moment of a device's own time


class Clock(Protocol):
    """Sets marks where work is launched and tells the time between two that have passed."""

    def mark(self) -> Mark:
        """The moment when all that was launched so far is done."""
        ...

    def seconds(self, begin: Mark, end: Mark) -> float | None:
        """From one mark to a later one; None while the later one lies ahead. Never waits."""
        ...

    def lead(self) -> None:
        """Keep the device busy for a moment: what is launched behind it waits for the device and
        not for the host, as it does in a server whose steps overlap."""
        ...


class HostClock:
    """For work that is done when its call returns: a CPU."""

    def __init__(self, read: Callable[[], float]) -> None:
        """read: seconds of the thread that computes."""
        self._read = read

    def mark(self) -> float:
        """Now."""
        return self._read()

    def seconds(self, begin: float, end: float) -> float:
        """The difference."""
        return end - begin

    def lead(self) -> None:
        """Nothing runs ahead of this device."""
