"""Read deploy/: the dashboard's panels, the alerts, and the metrics that a server exports."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from tests.docs.pages import ROOT, upstream
from tools.docs.metrics import LABELS, metrics

DEPLOY = ROOT / "deploy"
# What PromQL knows by itself of the words in our expressions.
WORDS = {"sum", "max", "avg", "rate", "increase", "histogram_quantile", "scalar"}
WORDS |= {"by", "and", "or", "unless", "offset"}
_NAME = r"(?<![\w.])[a-zA-Z_:][\w:]*"
_GROUPING = re.compile(r"\bby \(([^)]*)\) (?=\()")


@dataclass(frozen=True)
class Panel:
    """A panel of the dashboard; rows are skipped."""

    number: int
    title: str
    description: str
    expressions: tuple[str, ...]
    legends: tuple[str, ...]


@dataclass(frozen=True)
class Alert:
    """A rule of alerts.yml."""

    name: str
    expression: str
    severity: str
    annotations: dict[str, str]


@dataclass(frozen=True)
class Series:
    """A name on the wire. labels: None where another package declares them."""

    kind: str
    labels: frozenset[str] | None


def dashboard() -> dict[str, Any]:
    return json.loads((DEPLOY / "grafana" / "dspark.json").read_text())  # type: ignore[no-any-return]


def panels() -> list[Panel]:
    return [
        Panel(
            each["id"],
            each.get("title", ""),
            each.get("description", ""),
            tuple(target["expr"] for target in each.get("targets", ())),
            tuple(target.get("legendFormat", "") for target in each.get("targets", ())),
        )
        for each in dashboard()["panels"]
        if each["type"] != "row"
    ]


def alerts() -> list[Alert]:
    content = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    return [
        Alert(
            rule["alert"],
            rule["expr"],
            rule.get("labels", {}).get("severity", ""),
            rule.get("annotations", {}),
        )
        for group in content["groups"]
        for rule in group["rules"]
    ]


def expressions() -> Iterator[tuple[str, str]]:
    """Yield the panel or alert, and its expression, of the dashboard and of the alerts."""
    for panel in panels():
        for place, text in enumerate(panel.expressions):
            yield f"{panel.title} {place}", text
    for alert in alerts():
        yield alert.name, alert.expression


def on_the_wire(name: str, kind: str) -> tuple[str, ...]:
    """Names of a metric's samples, as prometheus_client writes them."""
    if kind == "counter":
        return (name.removesuffix("_total") + "_total",)
    if kind == "histogram":
        return tuple(f"{name}_{part}" for part in ("bucket", "sum", "count"))
    return (name,)


@cache
def series() -> dict[str, Series]:
    """All that may be asked for: ours, SGLang's, and Prometheus' own `up`."""
    found = {"up": Series("gauge", frozenset({"job"}))}
    calls = [
        node
        for node in ast.walk(ast.parse(upstream("observability/metrics_collector.py")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    for call in calls:
        kind = call.func.id.lower()  # type: ignore[attr-defined]
        named = {k.arg: k.value.value for k in call.keywords if isinstance(k.value, ast.Constant)}
        if kind in ("counter", "gauge", "histogram") and "name" in named:
            for name in on_the_wire(str(named["name"]), kind):
                found[name] = Series(kind, None)
    for metric in metrics():
        for name in on_the_wire(metric.name, metric.kind):
            found[name] = Series(metric.kind, frozenset({*LABELS, *metric.labels}))
    return found


def names(expression: str) -> set[str]:
    """The metrics that an expression asks for."""
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", " ", _GROUPING.sub(" ", expression))
    return set(re.findall(_NAME, bare)) - WORDS


def matchers(expression: str) -> Iterator[tuple[str, str, str]]:
    """(metric, label, value) of everything in braces."""
    for name, inside in re.findall(rf"({_NAME})\{{([^}}]*)\}}", expression):
        for label, value in re.findall(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"', inside):
            yield name, label, value


def groupings(expression: str) -> Iterator[tuple[set[str], str]]:
    """Every `by (labels) (inner)`: the labels and what they group."""
    for found in _GROUPING.finditer(expression):
        depth = 0
        for place in range(found.end(), len(expression)):
            depth += {"(": 1, ")": -1}.get(expression[place], 0)
            if depth == 0:
                break
        labels = set(re.findall(r"\w+", found[1]))
        yield labels, expression[found.end() + 1 : place]
