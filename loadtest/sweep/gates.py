"""Conditions on a sweep for continuous integration: `dspark>=mtp1@matched:1.3`.

    OVER >= UNDER @ WHERE : FACTOR
    WHERE: matched            speed per user at matched throughput
           throughput-N       tokens/s at N users
           speed-N            speed per user (median) at N users

A condition holds when the whole 95% interval of the ratio is at or above the factor: a run whose
noise could hide a miss does not pass.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.sweep.run_dir import Cell
from sglang_dspark.loadtest.sweep.summary import Cells, compared, matched_summary

_FORM = re.compile(
    r"^(?P<over>[a-z0-9-]+)>=(?P<under>[a-z0-9-]+)"
    r"@(?P<where>matched|throughput-\d+|speed-\d+):(?P<factor>\d+(\.\d+)?)$"
)
_WHAT = {"throughput": "tokens_per_s", "speed": "speed_p50"}


@dataclass(frozen=True)
class Gate:
    """One condition. users: None at matched throughput."""

    text: str
    over: str
    under: str
    what: str
    users: int | None
    factor: float


def parse_gate(text: str, arms: Sequence[str]) -> Gate:
    """Read a condition. Raises DSparkError when it is malformed or names an unknown arm."""
    found = _FORM.match("".join(text.split()))
    if found is None:
        raise DSparkError(
            f"--require {text!r} is not of the form dspark>=mtp1@matched:1.3 "
            "(or @throughput-4:1.0, @speed-4:1.0)"
        )
    for arm in (found["over"], found["under"]):
        if arm not in arms:
            raise DSparkError(f"--require {text!r}: no arm {arm}; there are {', '.join(arms)}")
    where, _, users = found["where"].partition("-")
    return Gate(
        text=text,
        over=found["over"],
        under=found["under"],
        what=_WHAT.get(where, "matched"),
        users=int(users) if users else None,
        factor=float(found["factor"]),
    )


def misses(gates: Sequence[Gate], cells: Sequence[Cell]) -> list[str]:
    """Return one line for each condition that does not hold."""
    good = Cells.of(cells)
    found = [_miss(gate, good) for gate in gates]
    return [line for line in found if line]


def _miss(gate: Gate, good: Cells) -> str:
    if gate.users is None:
        matched = matched_summary(good, gate.over, gate.under)
        low, mid, said = matched.low, matched.mid, matched.said
    else:
        ratio = compared(good, gate.over, gate.under, gate.what, "closed", float(gate.users))
        if ratio is None:
            return f"{gate.text} cannot be judged: no valid cells of both at {gate.users} users"
        low, mid, said = ratio.low, ratio.mid, ratio.said
    if mid is None:
        return f"{gate.text} cannot be judged: {said}"
    if low is None or low < gate.factor:
        return f"{gate.text} is not shown: {said}"
    return ""
