"""Read the counters of a server's `/metrics` page that a sweep saves, while it measures.

SGLang's totals and gauges (srt/observability/metrics_collector.py, 0.5.23) and the scheduler's
`sglang:dspark_*` (serving/metrics.py). A page has hundreds of lines and parsing disturbs the
measurement: only the needed lines are parsed.
"""

from __future__ import annotations

from collections.abc import Iterable

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.sweep.reconcile import ServerTotals, parse_totals
from sglang_dspark.loadtest.sweep.run_dir import Counters

_OURS = "sglang:dspark_"
_WANTED = (
    _OURS,
    "sglang:generation_tokens",
    "sglang:prompt_tokens",
    "sglang:num_requests",
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
)


def read_counters(client: httpx.Client, url: str, began: float, now: float) -> Counters:
    """Read the counters of a running server. began, now: on one clock, for `Counters.at`.

    Raises DSparkError if they cannot be read.
    """
    try:
        response = client.get(f"{url}/metrics")
    except httpx.TransportError as error:
        raise DSparkError(f"cannot read {url}/metrics ({error})") from error
    if response.status_code != 200:
        raise DSparkError(
            f"{url}/metrics answers {response.status_code}; start the server with --enable-metrics"
        )
    return parse_counters(response.text, now - began)


def totals_of(counters: Counters) -> ServerTotals:
    """Select the totals that `reconcile.disagreements` compares."""
    return ServerTotals(counters.requests, counters.generated, counters.prompt)


def parse_counters(text: str, at: float) -> Counters:
    """Parse a `/metrics` page. Raises DSparkError if it is invalid or has no SGLang counter."""
    lines = [line for line in text.splitlines() if _wanted(line)]
    if not lines and "sglang:" in text:  # nothing was served yet
        return Counters(at=at, requests=0.0, generated=0.0, prompt=0.0)
    wanted = "\n".join(lines) + "\n"
    totals = parse_totals(wanted)
    samples = [s for family in text_string_to_metric_families(wanted) for s in family.samples]
    return Counters(
        at=at,
        requests=totals.requests,
        generated=totals.generated,
        prompt=totals.prompt,
        running=_gauge(samples, "sglang:num_running_reqs"),
        queued=_gauge(samples, "sglang:num_queue_reqs"),
        steps=_by(samples, f"{_OURS}steps_total", "mode"),
        skips=_by(samples, f"{_OURS}draft_skips_total", "reason"),
        fallbacks=_sum(samples, f"{_OURS}fallbacks_total"),
        admitted=_positions(samples, f"{_OURS}admitted_drafts_total"),
        accepted=_positions(samples, f"{_OURS}accepted_drafts_total"),
        budget_sum=_sum(samples, f"{_OURS}budget_sum"),
        budget_count=_sum(samples, f"{_OURS}budget_count"),
        step_sum=_sum(samples, f"{_OURS}step_seconds_sum"),
        step_count=_sum(samples, f"{_OURS}step_seconds_count"),
        predicted_sum=_sum(samples, f"{_OURS}predicted_step_seconds_sum"),
        gain=_mean(samples, f"{_OURS}gain"),
    )


def _wanted(line: str) -> bool:
    name = line.removeprefix("# HELP ").removeprefix("# TYPE ")
    return name.startswith(_WANTED) and "_bucket{" not in name


def _named(samples: Iterable[Sample], name: str) -> list[Sample]:
    return [sample for sample in samples if sample.name == name]


def _sum(samples: Iterable[Sample], name: str) -> float:
    return float(sum(sample.value for sample in _named(samples, name)))


def _gauge(samples: Iterable[Sample], name: str) -> float | None:
    values = [sample.value for sample in _named(samples, name)]
    return float(sum(values)) if values else None


def _mean(samples: Iterable[Sample], name: str) -> float | None:
    """Return the mean of a gauge over replicas; None without one."""
    values = [sample.value for sample in _named(samples, name)]
    return float(sum(values)) / len(values) if values else None


def _by(samples: Iterable[Sample], name: str, label: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for sample in _named(samples, name):
        key = sample.labels[label]
        sums[key] = sums.get(key, 0.0) + float(sample.value)
    return sums


def _positions(samples: Iterable[Sample], name: str) -> list[float]:
    by = _by(samples, name, "position")
    return [by[key] for key in sorted(by, key=int)]
