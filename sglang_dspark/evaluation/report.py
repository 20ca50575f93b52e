"""Report one measurement as numbers by domain, for a table and for a result file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_dspark.evaluation.records import Generation
from sglang_dspark.evaluation.statistics import (
    Acceptance,
    ConfidencePairs,
    RequestCounts,
    acceptance,
    relative_difference,
)

OVERALL = "overall"


@dataclass(frozen=True)
class Confidence:
    """Raw survival as a prediction of acceptance: ROC-AUC, expected calibration error."""

    auc: float
    ece: float
    pairs: int


@dataclass(frozen=True)
class DomainReport:
    """Acceptance in one domain; confidence only for the engine and drafters that have one."""

    acceptance: Acceptance
    confidence: Confidence | None


Report = dict[str, DomainReport]  # domain -> numbers; OVERALL last


def engine_report(domains: Sequence[str], generations: Sequence[Generation], gamma: int) -> Report:
    """Report an engine run by domain; domains[i] belongs to generations[i].

    A domain without a verify step (every answer ended in the prefill) is skipped.
    """
    counts = [RequestCounts.from_generation(generation, gamma) for generation in generations]
    report: Report = {}
    for domain, index in _groups(domains).items():
        chosen = [counts[i] for i in index]
        if any(request.steps for request in chosen):
            pairs = ConfidencePairs.from_generations(generations[i] for i in index)
            confidence = None
            if len(pairs.survival):
                confidence = Confidence(pairs.auc(), pairs.ece(), len(pairs.survival))
            report[domain] = DomainReport(acceptance(chosen), confidence)
    return report


def served_report(domains: Sequence[str], counts: Sequence[RequestCounts]) -> Report:
    """Report a server's answers by domain; domains[i] belongs to counts[i]."""
    report: Report = {}
    for domain, index in _groups(domains).items():
        chosen = [counts[i] for i in index]
        if any(request.steps for request in chosen):
            report[domain] = DomainReport(acceptance(chosen), None)
    return report


@dataclass(frozen=True)
class Agreement:
    """Server against engine: differences in percent of the engine's value, and equal outputs.

    equal counts prompts with identical output tokens; None for sampled decoding, where the two
    use different random numbers.
    """

    tau_percent: float
    accept_length_percent: float
    equal: int | None
    prompts: int


def agreement(
    engine: Report,
    served: Report,
    engine_tokens: Sequence[Sequence[int]],
    served_tokens: Sequence[Sequence[int]],
    *,
    greedy: bool,
) -> Agreement:
    """Compare the overall rows of two reports over the same prompts."""
    ours, theirs = engine[OVERALL].acceptance, served[OVERALL].acceptance
    pairs = zip(engine_tokens, served_tokens, strict=True)
    equal = sum(tuple(a) == tuple(b) for a, b in pairs)
    return Agreement(
        tau_percent=relative_difference(theirs.tau, ours.tau),
        accept_length_percent=relative_difference(theirs.accept_length, ours.accept_length),
        equal=equal if greedy else None,
        prompts=len(engine_tokens),
    )


def macro_tau(report: Report) -> float:
    """Return the mean of tau over domains, each domain counting once."""
    taus = [part.acceptance.tau for domain, part in report.items() if domain != OVERALL]
    return sum(taus) / len(taus)


def metrics(report: Report) -> dict[str, Any]:
    """Return the `metrics` of a result file: tau, auc, ece and acceptance details, by domain."""
    taus = {domain: part.acceptance.tau for domain, part in report.items()}
    result: dict[str, Any] = {"tau": {**taus, "macro": macro_tau(report)}}
    for name in ("auc", "ece"):
        values = {
            domain: getattr(part.confidence, name)
            for domain, part in report.items()
            if part.confidence is not None
        }
        if values:
            result[name] = values
    result["by_domain"] = {domain: asdict(part.acceptance) for domain, part in report.items()}
    return result


def _groups(domains: Sequence[str]) -> dict[str, list[int]]:
    """Group indices by domain in order of appearance, and all of them under OVERALL."""
    groups: dict[str, list[int]] = {}
    for index, domain in enumerate(domains):
        groups.setdefault(domain, []).append(index)
    return {**groups, OVERALL: list(range(len(domains)))}
