"""Machines and loads of one kind each, by name; `simulation.scenarios` mixes everything."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sglang_dspark.schedule.simulation.scenarios import Machine, Trace, machine_from, trace_from

CURVES = ("jagged", "steep", "flat", "drifting")
LOADS = ("steady", "bursts", "shift")


def machine_of(curve: str, rng: np.random.Generator, max_requests: int, gamma: int) -> Machine:
    """One kind of `CURVES`: tiers with uneven steps, bound by arithmetic, bound by memory, or
    tiers on a machine that gets a third slower.
    """
    base = 0.01
    slope = base * {"jagged": 1e-2, "steep": 5e-2, "flat": 5e-4, "drifting": 1e-2}[curve]
    padded = curve in ("jagged", "drifting")
    machine = machine_from(rng, max_requests * (gamma + 1), gamma, base, slope, padded)
    return replace(machine, drift=4 / 3) if curve == "drifting" else machine


def trace_of(
    load: str, rng: np.random.Generator, max_requests: int, gamma: int, steps: int
) -> Trace:
    """One kind of `LOADS`: always as many requests; few and all of them in turns; or a subject
    that becomes hard half-way.
    """
    few, most = max(1, max_requests // 16), max_requests

    def active(t: int, before: int) -> int:
        if load != "bursts":
            return max(1, max_requests * 3 // 4)
        return most if t % 60 >= 45 else few

    return trace_from(
        rng, max_requests, gamma, steps, (1.5, -0.5 if load == "shift" else 1.5), active
    )
