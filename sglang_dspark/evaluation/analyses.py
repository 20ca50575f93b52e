"""The paper's analyses of draft quality (section 4) as functions of traces.

Each returns the `metrics` of a result file, which `figures` draws. tau is tokens per verify step
with the bonus (`statistics`); intervals are 95% bootstrap over prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import numpy as np

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.calibration_data import observations
from sglang_dspark.evaluation.records import Step
from sglang_dspark.evaluation.resampling import MACRO, Floats, Resampler, estimate
from sglang_dspark.evaluation.traces import Trace, require_comparable
from sglang_dspark.schedule.calibration import Calibration, Observations, apply_numpy

Rule = Literal["survival", "conditional"]


def counts_by_prompt(trace: Trace) -> tuple[Floats, Floats]:
    """Tokens that the verify steps yielded, and the number of steps: [prompts] each.

    A replayed answer ends its last windows early (`replay`). Those steps are left out: where the
    anchor stands decides it, never what was accepted there.
    """
    full = [[s for s in g.steps if s.verify_len == trace.gamma] for g in trace.generations]
    steps = np.array([len(each) for each in full], dtype=np.float64)
    accepted = [sum(step.accepted for step in each) for each in full]
    return steps + np.array(accepted, dtype=np.float64), steps


def tau_table(traces: Mapping[str, Trace]) -> dict[str, Any]:
    """Table 1: tau by domain and drafter, and the first drafter's ratio to each other one.

    Raises DSparkError when the traces have other prompts, targets or sampling.
    """
    labels = list(traces)
    require_comparable(list(traces.values()), labels)
    drawn = _tau_draws(traces)
    ratios = {}
    for other in labels[1:]:
        pairs = {name: drawn[labels[0]][name] / drawn[other][name] for name in drawn[other]}
        ratios[f"{labels[0]}/{other}"] = {n: asdict(estimate(d)) for n, d in pairs.items()}
    return {
        "analysis": "tau",
        **origin(traces),
        "tau": {k: {n: float(d[0]) for n, d in v.items()} for k, v in drawn.items()},
        "interval": {k: {n: _interval(d) for n, d in v.items()} for k, v in drawn.items()},
        "ratio": ratios,
    }


def positions(traces: Mapping[str, Trace]) -> dict[str, Any]:
    """Fig. 2: chance that draft k is accepted given drafts 1..k-1, by domain and overall.

    `reached` is the number of steps that accepted drafts 1..k-1. `cumulative` has the chance that
    drafts 1..k are all accepted.
    """
    require_comparable(list(traces.values()), list(traces))
    domains = next(iter(traces.values())).domains
    groups = {"overall": list(range(len(domains)))}
    for i, domain in enumerate(domains):
        groups.setdefault(domain, []).append(i)
    found: dict[str, Any] = {"analysis": "positions", **origin(traces)}
    for name, of in (("curves", _conditional), ("cumulative", _cumulative)):
        found[name] = {
            label: {name: of(trace.of_prompts(keep)) for name, keep in groups.items()}
            for label, trace in traces.items()
        }
    return found


def depth(series: Sequence[tuple[str, Trace]], note: str | None = None) -> dict[str, Any]:
    """Fig. 3: tau against the number of drafter layers; series share their label.

    note: kept, and said in the figure's title.
    """
    found = _curves(series, lambda trace: trace.drafter.layers)
    return {"analysis": "depth", "note": note, **found}


def length(series: Sequence[tuple[str, Trace]], note: str | None = None) -> dict[str, Any]:
    """Fig. 4a: tau against the proposal length gamma, one series a head; note as for `depth`."""
    return {"analysis": "length", "note": note, **_curves(series, lambda trace: trace.gamma)}


def thresholds(
    traces: Mapping[str, Trace],
    *,
    calibrations: Mapping[str, Calibration] | None = None,
    rule: Rule = "survival",
    points: int = 50,
) -> dict[str, Any]:
    """Fig. 5: acceptance rate and accepted length when drafts are admitted above a threshold.

    rule "survival" admits draft k while a_k > t, "conditional" while c_k > t. calibrations:
    for some of the labels. Admission shortens a chain and cannot change which drafts before
    the cut are accepted, so a trace that verified everything tells exactly what each of its steps
    would have yielded; that a shorter window moves later anchors is not followed.
    Raises DSparkError for a trace with shortened windows or without a confidence.
    """
    grid = np.linspace(0.0, 1.0, points, endpoint=False)
    curves = {}
    for label, trace in traces.items():
        _require_confidence(label, trace)
        data = observations(trace.generations, trace.gamma)
        if (data.verified < trace.gamma).any():
            raise DSparkError(f"{label}: the trace has shortened verify windows; record it in full")
        table = (calibrations or {}).get(label, Calibration.identity(trace.gamma))
        admitted = _admitted(data, table, rule, grid)  # [points, N]
        curves[label] = {
            name: _threshold_curve(data, admitted, keep, len(trace.prompts))
            for name, keep in _groups(trace, data).items()
        }
    return {
        "analysis": "thresholds",
        **origin(traces),
        "rule": rule,
        "calibrated": sorted(calibrations or {}),
        "thresholds": grid.tolist(),
        "curves": curves,
    }


def _tau_draws(traces: Mapping[str, Trace]) -> dict[str, dict[str, Floats]]:
    """label -> domain or macro -> [draws + 1] values of tau, on the same draws for all labels."""
    resampler = Resampler(next(iter(traces.values())).domains)
    drawn = {}
    for label, trace in traces.items():
        drawn[label] = resampler.ratios(*counts_by_prompt(trace))
        empty = [name for name, values in drawn[label].items() if np.isnan(values[0])]
        if empty:
            raise DSparkError(f"{label}: no verify step in {empty[0]}; raise --max-new-tokens")
    return drawn


def _curves(series: Sequence[tuple[str, Trace]], x_of: Callable[[Trace], int]) -> dict[str, Any]:
    require_comparable([trace for _, trace in series], [label for label, _ in series])
    curves: dict[str, list[dict[str, Any]]] = {}
    for label, trace in series:
        drawn = _tau_draws({label: trace})[label]
        point = {"x": x_of(trace), "drafter": asdict(trace.drafter)}
        point["tau"] = {name: asdict(estimate(values)) for name, values in drawn.items()}
        curves.setdefault(label, []).append(point)
    for points in curves.values():
        points.sort(key=lambda point: point["x"])
    first = series[0][1]
    return {"target": first.target, "settings": dict(first.settings), "curves": curves}


def _conditional(trace: Trace) -> list[dict[str, Any]]:
    """Position-wise conditional acceptance of one trace, all prompts in one group."""
    return _by_position(trace, lambda step, k: step.accepted >= k - 1)


def _cumulative(trace: Trace) -> list[dict[str, Any]]:
    """Chance that drafts 1..k are accepted, likewise."""
    return _by_position(trace, lambda _step, _k: True)


def _by_position(trace: Trace, counts: Callable[[Step, int], bool]) -> list[dict[str, Any]]:
    """Share of the verified drafts k that `counts` lets in whose step accepted k or more."""
    resampler = Resampler(["all"] * len(trace.prompts))
    result = []
    for k in range(1, trace.gamma + 1):
        reached, accepted = np.zeros(len(trace.prompts)), np.zeros(len(trace.prompts))
        for i, generation in enumerate(trace.generations):
            for step in generation.steps:
                if step.verify_len >= k and counts(step, k):
                    reached[i] += 1
                    accepted[i] += step.accepted >= k
        drawn = resampler.ratios(accepted, reached)[MACRO]
        result.append({**asdict(estimate(drawn)), "reached": int(reached.sum())})
    return result


def _admitted(data: Observations, table: Calibration, rule: Rule, grid: Floats) -> Floats:
    """Drafts admitted in each step at each threshold: [points, N]."""
    value = apply_numpy(data.logits, table)  # [N, gamma]
    if rule == "conditional":
        scaled = (data.logits + table.shift) / np.array(table.temperatures)
        value = np.minimum.accumulate(np.exp(-np.logaddexp(0.0, -scaled)), axis=1)
    return (value[None] > grid[:, None, None]).sum(axis=2).astype(np.float64)


def _threshold_curve(
    data: Observations, admitted: Floats, keep: np.ndarray, prompts: int
) -> dict[str, Any]:
    """Curves over the grid for the steps `keep` [N] bool, with intervals over prompts."""
    owner = data.request[keep]
    present = np.unique(owner)
    resampler = Resampler(["all"] * len(present), draws=500)
    steps = np.bincount(owner, minlength=prompts)[present].astype(np.float64)
    rates, lengths, shares = [], [], []
    for row in admitted[:, keep]:
        taken = np.minimum(data.accepted[keep], row)
        accepted = np.bincount(owner, weights=taken, minlength=prompts)[present]
        offered = np.bincount(owner, weights=row, minlength=prompts)[present]
        rates.append(estimate(resampler.ratios(accepted, offered)[MACRO]))
        lengths.append(estimate(resampler.ratios(accepted + steps, steps)[MACRO]))
        shares.append(float(offered.sum() / (steps.sum() * data.gamma)))
    return {
        "acceptance_rate": [asdict(each) for each in rates],
        "tau": [asdict(each) for each in lengths],
        "admitted_share": shares,
        "steps": int(keep.sum()),
    }


def _groups(trace: Trace, data: Observations) -> dict[str, np.ndarray]:
    """Steps [N] bool of each domain, and all of them under `overall`."""
    domain = np.array(trace.domains)[data.request]
    groups = {"overall": np.ones(len(domain), dtype=bool)}
    return {**groups, **{name: domain == name for name in dict.fromkeys(trace.domains)}}


def _require_confidence(label: str, trace: Trace) -> None:
    if not trace.has_confidence():
        raise DSparkError(
            f"{label}: the drafter tells no confidence, so nothing can be shown of it"
        )


def _interval(drawn: Floats) -> list[float]:
    found = estimate(drawn)
    return [found.low, found.high]


def origin(traces: Mapping[str, Trace]) -> dict[str, Any]:
    """What the figures are of: target, sampling, prompts by domain, drafters."""
    first = next(iter(traces.values()))
    prompts = {name: first.domains.count(name) for name in dict.fromkeys(first.domains)}
    return {
        "target": first.target,
        "settings": dict(first.settings),
        "prompts": prompts,
        "drafters": {label: asdict(trace.drafter) for label, trace in traces.items()},
    }
