"""Guard the reading of a file: no code, no pickle, no connection, bounded time and memory.

The interpreter's own audit events report a violation, from any caller.
"""

from __future__ import annotations

import pickle
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, ClassVar

import torch

FORBIDDEN = frozenset(
    {
        "os.exec",
        "os.fork",
        "os.posix_spawn",
        "os.system",
        "pickle.find_class",
        "socket.connect",
        "socket.getaddrinfo",
        "subprocess.Popen",
    }
)
CASE_S = 20.0  # of processor time that a case may take; milliseconds are usual
WAIT_S = 300.0  # and by the clock, beside neighbours that leave it little of a processor
MOST_GROWTH = 1 << 30  # bytes of memory that one case may add to the most the process ever had
_PICKLE = ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load"))


class Forbidden(BaseException):
    """Something of the above. No reader's `except` catches it."""


class _Watch:
    """State of the audit hook: on or off, and the events seen."""

    on = False
    installed = False
    seen: ClassVar[list[str]] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _Watch.on and event in FORBIDDEN:
        _Watch.seen.append(f"{event} {arguments!r:.120}")
        raise Forbidden(_Watch.seen[-1])


def _wire(name: str) -> Callable[..., Any]:
    def trip(*arguments: Any, **options: Any) -> Any:
        _Watch.seen.append(name)
        raise Forbidden(name)

    return trip


@contextmanager
def watched() -> Iterator[None]:
    """Around one case; raises `Forbidden` at its end too, should a reader have swallowed it.

    Pickles of the standard library and of torch cannot be loaded within.
    """
    if not _Watch.installed:
        sys.addaudithook(_hook)  # it cannot be taken out again
        _Watch.installed = True
    _Watch.seen = []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    kept = [(module, name, getattr(module, name)) for module, name in _PICKLE]
    for module, name, _ in kept:
        setattr(module, name, _wire(f"{module.__name__}.{name}"))
    _Watch.on = True
    try:
        with _alarm():
            yield
    finally:
        _Watch.on = False
        for module, name, value in kept:
            setattr(module, name, value)
    if _Watch.seen:
        raise Forbidden(_Watch.seen[0])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if grown > MOST_GROWTH:
        raise Forbidden(f"{grown >> 20} MiB more memory")


@contextmanager
def _alarm() -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        computed = number == signal.SIGPROF
        raise Forbidden(f"longer than {CASE_S if computed else WAIT_S} s")

    timers = (
        (signal.ITIMER_PROF, signal.SIGPROF, CASE_S),
        (signal.ITIMER_REAL, signal.SIGALRM, WAIT_S),
    )
    before = [signal.signal(number, late) for _, number, _ in timers]
    for timer, _, seconds in timers:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (timer, number, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0.0)
            signal.signal(number, handler)
