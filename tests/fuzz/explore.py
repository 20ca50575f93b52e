"""Run all cases of a family and report the findings.

Hypothesis generates. A case is accepted or refused; any other outcome is a finding, identified by
the line that raised it and kept with the smallest case that leads there.
"""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, find, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky, NoSuchExample

SHRINK, SHRINK_S = 1000, 10.0  # cases and seconds that may be spent on making a finding smaller
MOST_SHOWN = 2000  # characters of a case


@dataclass(frozen=True)
class Family:
    """Cases of one kind. check: True for accepted, False for refused; it raises what is a finding.

    share: how many of the cases, beside other families. shrinks: findings are made smaller by more
    cases.
    """

    name: str
    group: str
    cases: st.SearchStrategy[Any]
    check: Callable[[Any], bool]
    share: float = 1.0
    shrinks: bool = True


@dataclass
class Finding:
    """said: what was raised; place: where; smallest: the case; count: how many led there."""

    said: str
    place: str
    smallest: Any
    count: int = 1

    def __str__(self) -> str:
        case = repr(self.smallest)[: 2 * MOST_SHOWN]
        cut = case if len(case) <= MOST_SHOWN else f"{case[:MOST_SHOWN]}…"
        return f"{self.said}\n    at {self.place}, {self.count} times; for example\n    {cut}"


@dataclass
class Tally:
    """Counts and findings of a family."""

    name: str
    group: str
    accepted: int = 0
    refused: int = 0
    seconds: float = 0.0
    findings: dict[str, Finding] = field(default_factory=dict)

    @property
    def cases(self) -> int:
        """All of them."""
        return self.accepted + self.refused + sum(each.count for each in self.findings.values())

    def line(self) -> str:
        """For the terminal."""
        return (
            f"{self.group:12} {self.name:22} {self.cases:6} cases {self.refused:6} refused "
            f"{self.accepted:6} accepted {len(self.findings):3} findings {self.seconds:7.1f} s"
        )


def explore(family: Family, count: int, number: int = 0) -> Tally:
    """`count` cases of a family, the same ones for the same `number`."""
    tally = Tally(family.name, family.group)
    began = time.monotonic()

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    @given(case=family.cases)
    def every(case: Any) -> None:
        _judge(family, tally, case)

    every()
    tally.seconds = time.monotonic() - began
    if family.shrinks:
        for place in tally.findings:
            _shrink(family, tally.findings[place], number)
    return tally


def _judge(family: Family, tally: Tally, case: Any) -> None:
    try:
        accepted = family.check(case)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        said, place = _described(error)
        known = tally.findings.get(place)
        if known is None:
            tally.findings[place] = Finding(said, place, case)
            return
        known.count += 1
        if _size(case) < _size(known.smallest):
            known.said, known.smallest = said, case
    else:
        tally.accepted += accepted
        tally.refused += not accepted


def _described(error: BaseException) -> tuple[str, str]:
    """Return the error as text, and our last line in its traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "/sglang_dspark/" in f.filename or "/loadtest/" in f.filename]
    frame = (ours or frames)[-1]
    name = "/".join(frame.filename.split("/")[-3:])
    # Our own assertions are distinguished by their words.
    words = str(error).split(":")[0] if not ours or isinstance(error, AssertionError) else ""
    place = f"{name}:{frame.lineno} {type(error).__name__} {words}".strip()
    return f"{type(error).__name__}: {str(error)[:500]}", place


def _shrink(family: Family, finding: Finding, number: int) -> None:
    until = time.monotonic() + SHRINK_S

    def leads_there(case: Any) -> bool:
        if time.monotonic() > until:
            return False
        again = Tally(family.name, family.group)
        _judge(family, again, case)
        if finding.place not in again.findings:
            return False
        if _size(case) < _size(finding.smallest):
            finding.smallest = case
        return True

    limits = settings(
        max_examples=SHRINK,
        deadline=None,
        database=None,
        derandomize=True,
        verbosity=Verbosity.quiet,
        suppress_health_check=list(HealthCheck),
    )
    # Flaky: memory is taken once only, and the time for this runs out in the middle.
    with suppress(NoSuchExample, Flaky), warnings.catch_warnings(action="ignore"):
        find(family.cases, leads_there, settings=limits)


def _size(case: Any) -> int:
    """Return the length of a case, without the repr of all of it."""
    if isinstance(case, bytes | str):
        return len(case)
    if isinstance(case, tuple):
        return sum(map(_size, case))
    return len(repr(case))
