"""Share code between the analyses of traces: origin, tau by domain, groups of verify steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_dspark.common.files import brief
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.analyses.analysis import Result
from sglang_dspark.evaluation.resampling import Estimate, Floats, Resampler
from sglang_dspark.evaluation.traces import DrafterFacts, Trace
from sglang_dspark.schedule.calibration import Observations

OVERALL = "overall"
ByDomain = Mapping[str, Estimate]  # and `macro` or `overall`


@dataclass(frozen=True)
class TracedResult(Result):
    """A result of comparable traces: prompts by domain, drafters by label."""

    prompts: Mapping[str, int]
    drafters: Mapping[str, DrafterFacts]


def origin(
    traces: Mapping[str, Trace],
) -> tuple[str, dict[str, Any], dict[str, int], dict[str, DrafterFacts]]:
    """Return the fields of a `TracedResult`, in their order."""
    first = next(iter(traces.values()))
    prompts = {name: first.domains.count(name) for name in dict.fromkeys(first.domains)}
    drafters = {label: trace.drafter for label, trace in traces.items()}
    return first.target, dict(first.settings), prompts, drafters


def counts_by_prompt(trace: Trace) -> tuple[Floats, Floats]:
    """Count the tokens that the verify steps yielded, and the steps: [prompts] each.

    A replayed answer ends its last windows early (`replay`). Those steps are skipped: the position
    of the anchor decides it, never the acceptance there.
    """
    full = [[s for s in g.steps if s.verify_len == trace.gamma] for g in trace.generations]
    steps = np.array([len(each) for each in full], dtype=np.float64)
    accepted = [sum(step.accepted for step in each) for each in full]
    return steps + np.array(accepted, dtype=np.float64), steps


def tau_draws(traces: Mapping[str, Trace]) -> dict[str, dict[str, Floats]]:
    """Draw tau on the same draws for all labels: label -> domain or macro -> [draws + 1] values.

    Raises DSparkError if a domain has no verify step.
    """
    resampler = Resampler(next(iter(traces.values())).domains)
    drawn = {}
    for label, trace in traces.items():
        drawn[label] = resampler.ratios(*counts_by_prompt(trace))
        empty = [name for name, values in drawn[label].items() if np.isnan(values[0])]
        if empty:
            raise DSparkError(
                f"the trace of {label} has no verify step in {brief(empty[0], 60)}; record it "
                "again with a larger --max-new-tokens"
            )
    return drawn


def step_groups(trace: Trace, data: Observations) -> dict[str, NDArray[np.bool_]]:
    """Select the steps [N] of all domains, under `overall`, then those of each domain."""
    domain = np.array(trace.domains)[data.request]
    groups: dict[str, NDArray[np.bool_]] = {OVERALL: np.ones(len(domain), dtype=bool)}
    return {**groups, **{name: domain == name for name in dict.fromkeys(trace.domains)}}
