"""Write docs/metrics.md from the metrics that a scheduled server registers.

Name, type, labels and meaning are those that the collector of serving/metrics.py registers in
prometheus_client. `WHEN` has when to look at a metric. The generator stops if a metric has no line
in it, or a line has no metric.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry

from sglang_dspark.schedule.guard import Mode
from sglang_dspark.serving.fallbacks import Fallback
from sglang_dspark.serving.metrics import PREFIX, REASONS, Collector

LABELS = ("model_name", "tp_rank")  # of every metric, as SGLang's own have them
WHEN = {
    "steps": "first of all: which way the server decodes. Mostly `plain` under a light load means "
    "that drafts do not pay here",
    "draft_skips": "together with `steps`: why steps had no draft",
    "fallbacks": "when throughput drops, and after a start: what went wrong, and how often; "
    "[each](#fallbacks) is logged once",
    "admitted_drafts": "how deep verification goes; decreases with the load",
    "accepted_drafts": "divided by `admitted_drafts` of the same position: the acceptance rate. A "
    "lower rate means prompts unlike those of the training",
    "budget": "how many drafts a step verifies in all",
    "step_seconds": "when answers are slow: whether steps are long, or too many",
    "predicted_step_seconds": "with `step_seconds`: the two means should agree",
    "step_time_error": "it grows and stays: the machine is busy with something else, or slower "
    "than when it was profiled",
    "gain": "with `steps`: the guard decides by it. Below 1.04 it soon leaves `speculate`",
    "calibration_error": "it grows and stays: confidence misleads on these prompts; run "
    "`dspark calibrate` on prompts like yours",
    "survival_error": "the same in one number, over all positions",
    "step_time_outliers": "grows fast where other programs take the cores",
    "kernel_compilations": "on a GPU, when single steps take seconds: it grows while all requests "
    "wait. The log names each kernel; those of made-up requests at the start are not counted",
    "drafter_misfit": "1: fewer than one first draft in ten is accepted; the log has the causes "
    "([it is slow](troubleshooting.md#it-is-slow))",
}
HEAD = """# Metrics

For operators. This page has every metric that a server with `--enable-metrics` adds to SGLang's at
`/metrics`. It adds them if our scheduler decides (`schedule.mode: auto`, the default), with the
first requests. The page is generated from the code that registers them. [Operations](operations.md)
says what to watch and when to alert.

Every metric has the labels {labels}, and `dp_rank` if a server has several replicas
([parallel](parallel.md)). In the exposition format a counter's name ends in `_total`; a histogram
has `_bucket`, `_sum` and `_count`. Prometheus 2 requests OpenMetrics and gets `sglang_` for
`sglang:`, also in SGLang's metrics; `deploy/prometheus/prometheus.yml` has a rule that restores the
names of this page.

| name | type | further labels | meaning | when to look at it |
|---|---|---|---|---|
"""
TAIL = """
`mode` is one of {modes}:
the guard's mode ([the scheduler](scheduler.md#when-drafting-does-not-pay)), or `off` while
acceptance is below `schedule.min_acceptance`. `reason` of
`draft_skips` is one of {reasons}.
`position` counts drafts of a request from 1.

## Fallbacks

`reason` of `fallbacks` is one of these. None costs an answer, and greedy answers stay plain
decoding's; [each failure](faults.md) is tested.

| reason | meaning |
|---|---|
{fallbacks}
"""


class Metric(NamedTuple):
    """A registered metric. labels: those beyond `LABELS`."""

    name: str
    kind: str
    labels: tuple[str, ...]
    meaning: str


def metrics() -> list[Metric]:
    """Return all metrics in the order of registration."""
    collector = Collector(dict.fromkeys(LABELS, ""), CollectorRegistry())
    return [_metric(each) for each in vars(collector).values() if hasattr(each, "_labelnames")]


def _metric(metric: Any) -> Metric:
    labels = tuple(name for name in metric._labelnames if name not in LABELS)
    return Metric(metric._name, metric._type, labels, metric._documentation)


def metrics_page() -> str:
    """Return docs/metrics.md."""
    found = metrics()
    short = [metric.name.removeprefix(PREFIX) for metric in found]
    if odd := set(short) ^ WHEN.keys():
        raise SystemExit(f"tools/docs/metrics.py: WHEN and the collector differ in {sorted(odd)}")
    rows = (
        f"| `{metric.name}` | {metric.kind} | {_code(metric.labels)} | "
        f"{metric.meaning.replace('|', chr(92) + '|')} | {WHEN[name]} |"
        for metric, name in zip(found, short, strict=True)
    )
    head = HEAD.format(labels=_code(LABELS))
    reasons = dict.fromkeys([*REASONS.values(), Fallback.DRAFT_FAILED.value])
    fallbacks = "\n".join(f"| `{fallback.value}` | {fallback.meaning} |" for fallback in Fallback)
    return (
        head
        + "\n".join(rows)
        + "\n"
        + TAIL.format(
            modes=_code(mode.value for mode in Mode), reasons=_code(reasons), fallbacks=fallbacks
        )
    )


def _code(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)
