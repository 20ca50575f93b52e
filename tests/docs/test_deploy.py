"""deploy/: what it asks a server for is exported, what it publishes is loopback, what it links is
there. That the expressions answer on a live server is shown by tests/integration/test_deploy.py."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_dspark.extras import SUPPORTED_SGLANG
from sglang_dspark.schedule.guard import Mode
from tests.docs.deployed import (
    DEPLOY,
    alerts,
    dashboard,
    expressions,
    groupings,
    matchers,
    names,
    panels,
    series,
)
from tests.docs.pages import ROOT, anchors
from tests.docs.test_pages import server_flags
from tools.docs.metrics import metrics

COMPOSE = DEPLOY / "compose.yaml"
THEIR_LABELS = {"model_name"}  # of SGLang's metrics, those that ours have too
BY_PROMETHEUS = {"instance", "job"}
ASKED = list(expressions())


def compose() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())  # type: ignore[no-any-return]


def service(name: str) -> dict[str, Any]:
    return compose()["services"][name]  # type: ignore[no-any-return]


def mounts(name: str) -> dict[str, str]:
    """Place in the container -> relative path here."""
    found = (each.split(":") for each in service(name)["volumes"] if each.startswith("."))
    return {place: path for path, place, *_ in found}


@pytest.mark.parametrize("file", sorted(DEPLOY.rglob("*.y*ml")), ids=lambda path: path.name)
def test_yaml_parses(file: Path) -> None:
    assert isinstance(yaml.safe_load(file.read_text()), dict)


@pytest.mark.parametrize(("who", "expression"), ASKED, ids=[who for who, _ in ASKED])
def test_only_exported_metrics_are_asked_for(who: str, expression: str) -> None:
    asked = names(expression)
    assert asked
    assert sorted(asked - series().keys()) == []


@pytest.mark.parametrize(("who", "expression"), ASKED, ids=[who for who, _ in ASKED])
def test_labels_are_those_of_the_metrics(who: str, expression: str) -> None:
    for name, label, value in matchers(expression):
        assert label in (series()[name].labels or THEIR_LABELS), f"{name} has no {label}"
        if label == "mode":
            assert value in {mode.value for mode in Mode}
    assert len(list(groupings(expression))) == expression.count(" by ")
    for labels, inner in groupings(expression):
        for name in names(inner):
            known = series()[name].labels or THEIR_LABELS
            buckets = {"le"} if name.endswith("_bucket") else set()
            assert labels - buckets - BY_PROMETHEUS <= known, name


@pytest.mark.parametrize(("who", "expression"), ASKED, ids=[who for who, _ in ASKED])
def test_rates_are_of_counters_and_of_nothing_else(who: str, expression: str) -> None:
    rated = set(re.findall(r"\b(?:rate|increase)\(([\w:]+)", expression))
    for name in names(expression):
        if name in rated:
            assert series()[name].kind != "gauge", f"{name} is no counter"
        elif series()[name].kind == "histogram":
            raise AssertionError(f"{name} since the start says nothing of today")


def test_every_metric_of_ours_is_shown() -> None:
    shown = set().union(*(names(text) for panel in panels() for text in panel.expressions))
    bare = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in shown}
    assert [metric.name for metric in metrics() if metric.name not in bare] == []


def test_the_page_on_what_to_watch_is_covered() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    section = text.partition("## What to watch")[2].partition("\n## ")[0]
    wanted = set(re.findall(r"`(sglang:\w+)`", section))
    assert len(wanted) > 8
    shown = " ".join(text for _, text in ASKED)
    assert [name for name in sorted(wanted) if name not in shown] == []


def test_panels_are_numbered_named_and_described() -> None:
    numbers = [each["id"] for each in dashboard()["panels"]]
    assert len(set(numbers)) == len(numbers)
    titles = [panel.title for panel in panels()]
    assert len(set(titles)) == len(titles) > 12
    for panel in panels():
        assert panel.title
        assert len(panel.description.split()) >= 5, panel.title
        assert panel.expressions, panel.title
        assert all(panel.expressions), panel.title


def test_legends_name_labels_that_are_left() -> None:
    for panel in panels():
        for text, legend in zip(panel.expressions, panel.legends, strict=True):
            assert legend, panel.title
            left = set().union(*(labels for labels, _ in groupings(text)))
            assert set(re.findall(r"{{(\w+)}}", legend)) <= left, panel.title


def test_panels_lie_beside_each_other_within_the_width() -> None:
    taken: set[tuple[int, int]] = set()
    for each in dashboard()["panels"]:
        place = each["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, each["title"]
        taken |= cells


def test_the_dashboard_takes_any_prometheus() -> None:
    """Imported by hand it asks which; provisioned it takes the only one."""
    kinds = {each["name"]: each["type"] for each in dashboard()["templating"]["list"]}
    assert kinds["datasource"] == "datasource"
    for each in dashboard()["panels"]:
        for part in (each, *each.get("targets", ())):
            if each["type"] != "row":
                assert part["datasource"] == {"type": "prometheus", "uid": "${datasource}"}


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)
def test_an_alert_says_what_is_wrong_and_what_to_do(alert: Any) -> None:
    assert alert.severity in ("critical", "warning", "info")
    assert "{{ $labels.instance }}" in alert.annotations["summary"]
    assert len(alert.annotations["description"].split()) > 10
    page, _, anchor = alert.annotations["runbook"].partition("#")
    assert anchor in anchors(ROOT / page)


def test_names_of_alerts_are_unique() -> None:
    found = [alert.name for alert in alerts()]
    assert len(set(found)) == len(found) >= 8


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on PATH")
@pytest.mark.parametrize(("what", "file"), [("config", "prometheus.yml"), ("rules", "alerts.yml")])
def test_prometheus_takes_it(what: str, file: str) -> None:
    command = ["promtool", "check", what, str(DEPLOY / "prometheus" / file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", compose()["services"])
def test_what_is_published_is_loopback(name: str) -> None:
    own = service(name)
    assert own["ports"]
    for port in own["ports"]:
        assert re.fullmatch(r"127\.0\.0\.1:\d+:\d+", port)
    assert "network_mode" not in own
    assert not own.get("privileged", False)


def test_images_are_named_by_version() -> None:
    found = [each["image"] for each in compose()["services"].values() if "image" in each]
    assert len(found) == 2
    for image in found:
        assert re.fullmatch(r"[a-z0-9./-]+:v?\d+\.\d+\.\d+", image), image


def test_what_only_the_user_knows_is_asked_for() -> None:
    """Compose stops with the message where a variable is not set; no password has a default."""
    variables = dict(re.findall(r"\$\{(\w+)(:[?-][^}]*)\}", COMPOSE.read_text()))
    assert "${" not in re.sub(r"\$\{\w+:[?-][^}]*\}", "", COMPOSE.read_text())
    for name in ("TARGET_DIR", "DRAFTER_DIR", "GRAFANA_PASSWORD"):
        assert re.match(r":\?\w+ .{10}", variables[name]), name
    page = (ROOT / "docs" / "operations.md").read_text()
    assert [name for name in variables if name not in page] == []


def test_the_server_exports_metrics_by_flags_that_exist() -> None:
    flags = {flag.partition("=")[0] for flag in service("dspark")["command"]}
    assert flags <= server_flags()
    assert "--enable-metrics" in flags


def on_gpus() -> dict[str, Any]:
    """Return the server's settings of compose.cuda.yaml, which replace those of compose.yaml."""
    parsed = yaml.safe_load((DEPLOY / "compose.cuda.yaml").read_text())
    assert list(parsed["services"]) == ["dspark"]
    return parsed["services"]["dspark"]  # type: ignore[no-any-return]


def test_the_gpu_file_changes_the_device_alone() -> None:
    """Ports, volumes and restrictions stay those of compose.yaml."""
    own = on_gpus()
    assert not {"ports", "volumes", "cap_drop", "security_opt", "privileged", "network_mode"} & set(
        own
    )
    flags = {flag.partition("=")[0] for flag in own["command"]}
    assert flags <= server_flags()
    shared = {flag for flag in service("dspark")["command"] if not flag.startswith("--device")}
    assert shared <= set(own["command"])
    [device] = own["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert f"--tp-size={device['count']}" in own["command"]


def test_the_gpu_image_is_of_the_supported_sglang() -> None:
    lines = (DEPLOY / "Dockerfile.cuda").read_text()
    assert (ROOT / on_gpus()["build"]["dockerfile"]) == DEPLOY / "Dockerfile.cuda"
    [version] = re.findall(r"^FROM lmsysorg/sglang:v(.+)$", lines, re.MULTILINE)
    assert version == SUPPORTED_SGLANG == re.findall(r"== '([\d.]+)'", lines)[0]
    assert f"lmsysorg/sglang:v{version}" in (ROOT / "docs" / "gpu-quickstart.md").read_text()
    sent = DEPLOY / "Dockerfile.cuda.dockerignore"
    assert sent.read_text() == (DEPLOY / "Dockerfile.dockerignore").read_text()


def test_variables_of_the_gpu_file_are_on_its_page() -> None:
    text = (DEPLOY / "compose.cuda.yaml").read_text()
    page = (ROOT / "docs" / "gpu-quickstart.md").read_text()
    asked = set(re.findall(r"\$\{(\w+):-", text)) - {"MODEL_NAME"}
    assert asked == {"TP_SIZE", "MAX_RUNNING_REQUESTS"}
    assert [name for name in asked if name not in page] == []


def test_each_finds_the_other() -> None:
    """Prometheus the server, Grafana Prometheus and the dashboard."""
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    assert target == "dspark:30000"
    assert f"--port={target.partition(':')[2]}" in service("dspark")["command"]
    assert f'job="{job["job_name"]}"' in " ".join(alert.expression for alert in alerts())
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    assert service("prometheus")["ports"] == ["127.0.0.1:9090:9090"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "dspark.yml").read_text())[
        "providers"
    ]
    folder = provider["options"]["path"]
    assert mounts("grafana")[f"{folder}/dspark.json"] == "./grafana/dspark.json"


@pytest.mark.parametrize("name", ["prometheus", "grafana"])
def test_what_is_mounted_is_there(name: str) -> None:
    assert mounts(name)
    for path in mounts(name).values():
        assert (DEPLOY / path).exists(), path
