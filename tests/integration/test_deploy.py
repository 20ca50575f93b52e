"""deploy/ on the real things: a tiny DSPARK server with some load, and Prometheus itself, which
evaluates every expression of the dashboard and of the alerts."""

from __future__ import annotations

import math
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.docs.deployed import DEPLOY, Alert, alerts, names, panels
from tests.integration.serving import DSPARK_FLAGS, HOST, Served, ServerPool
from tests.integration.tiny_models import TinyPair
from tests.ports import free_ports

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.xdist_group("tiny-pair"),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not on PATH"),
]

PATIENCE_S = 120.0
USERS = 4
PROMPTS = [f"Once upon a time number {i}" for i in range(24)]
MAY_BE_ABSENT = {  # metric -> why a server that has served may not have it
    "sglang:dspark_fallbacks_total": "no load was found to lose by drafting",
    "sglang:dspark_draft_skips_total": "every step drafted",
    "sglang:dspark_survival_error": "too few drafts were verified to tell",
}
GROWS = {  # panels that are above 0 under any load
    "Time to first token (TTFT)",
    "Time per output token (TPOT)",
    "Steps by mode",
    "Step time",
    "Tokens per step (tau)",
}


@dataclass
class Prometheus:
    """A Prometheus that asks one server every second."""

    http: httpx.Client

    def get(self, path: str, **query: str) -> Any:
        answer = self.http.get(f"/api/v1/{path}", params=query)
        assert answer.status_code == 200, f"{query}: {answer.text[:300]}"
        return answer.json()["data"]

    def values(self, expression: str) -> list[float]:
        """Of every series of the result; fails where the expression does."""
        return [float(each["value"][1]) for each in self.get("query", query=expression)["result"]]

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            assert time.monotonic() < deadline, "Prometheus did not get there"
            time.sleep(0.5)


def config_for(port: int, folder: Path) -> Path:
    """deploy's configuration, its target and its pace exchanged, beside deploy's rules."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    config["global"] = dict.fromkeys(config["global"], "1s")
    config["scrape_configs"][0]["static_configs"][0]["targets"] = [f"{HOST}:{port}"]
    shutil.copy(DEPLOY / "prometheus" / "alerts.yml", folder)
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.fixture(scope="module")
def watched(pool: ServerPool, noisy: TinyPair) -> Iterator[Served]:
    """The tiny pair as deploy/compose.yaml starts a server: scheduled, with metrics."""
    yield pool.start(
        *("deployed", noisy.target, *DSPARK_FLAGS, str(noisy.drafter), "--enable-metrics")
    )
    pool.stop("deployed")


@pytest.fixture(scope="module")
def prometheus(watched: Served, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """It has seen the server before the load, in it and after it, and both rule groups twice."""
    folder = tmp_path_factory.mktemp("prometheus")
    port = free_ports()
    command = [
        "prometheus",
        f"--config.file={config_for(watched.process.spec.port, folder)}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={HOST}:{port}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        with httpx.Client(base_url=f"http://{HOST}:{port}", trust_env=False, timeout=30) as http:
            found = Prometheus(http)
            found.until(lambda: _ready(http))
            watched.generate(PROMPTS[0])  # the counters are there, so that they are seen to grow
            _await_scrapes(found, 2)
            watched.generate_all(PROMPTS, USERS, max_new_tokens=96)
            _await_scrapes(found, 2)
            yield found
    finally:
        process.terminate()
        process.wait(30)


def _ready(http: httpx.Client) -> bool:
    try:
        return http.get("/-/ready").status_code == 200
    except httpx.TransportError:
        return False


def _await_scrapes(prometheus: Prometheus, count: int) -> None:
    """Until the server has answered `count` times from now on."""

    def answered() -> float:
        return sum(prometheus.values('sum_over_time(up{job="dspark"}[1h])'))

    before = answered()
    prometheus.until(lambda: answered() >= before + count)


def asked(expression: str) -> str:
    """An expression of the dashboard with Grafana's variables filled in."""
    return expression.replace("$__rate_interval", "5m").replace("$model", ".*")


@pytest.mark.parametrize(
    ("title", "expression"),
    [
        pytest.param(panel.title, asked(text), id=f"{panel.title}-{place}")
        for panel in panels()
        for place, text in enumerate(panel.expressions)
    ],
)
def test_a_panel_has_something_to_show(
    watched: Served, prometheus: Prometheus, title: str, expression: str
) -> None:
    values = prometheus.values(expression)
    page = watched.request("GET", "/metrics").text
    absent = [name for name in names(expression) if f"\n{name}" not in page]
    assert set(absent) <= MAY_BE_ABSENT.keys(), "the server does not export it"
    if not absent:
        assert [value for value in values if not math.isnan(value)]
    if title in GROWS:
        assert max(values) > 0


def test_names_are_the_same_however_prometheus_asks(prometheus: Prometheus) -> None:
    """Prometheus 2 asks for OpenMetrics, where a server writes underscores for colons."""
    assert prometheus.values('count({__name__=~"sglang:.+"})')[0] > 100
    assert prometheus.values('count({__name__=~"sglang_.+"})') == []


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)
def test_an_alert_can_be_evaluated(prometheus: Prometheus, alert: Alert) -> None:
    prometheus.values(alert.expression)
    prometheus.until(lambda: rules(prometheus)[alert.name]["health"] != "unknown")
    rule = rules(prometheus)[alert.name]
    assert rule["health"] == "ok", rule.get("lastError")


def rules(prometheus: Prometheus) -> dict[str, dict[str, Any]]:
    groups = prometheus.get("rules")["groups"]
    return {rule["name"]: rule for group in groups for rule in group["rules"]}


def test_all_alerts_are_loaded_and_a_healthy_server_is_not_critical(prometheus: Prometheus) -> None:
    found = rules(prometheus)
    assert found.keys() == {alert.name for alert in alerts()}
    critical = [n for n, rule in found.items() if rule["labels"]["severity"] == "critical"]
    assert {name: found[name]["state"] for name in critical} == dict.fromkeys(critical, "inactive")
