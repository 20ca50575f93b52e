"""Test when each alert fires, by `promtool test rules`: Prometheus' own evaluation.

A server's series have a value a minute; after two hours the test checks which alerts are on.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.docs.deployed import DEPLOY, Alert, alerts

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not on PATH")

Load = dict[str, str]  # series without the server's labels -> values in promtool's notation
TTFT = "sglang:time_to_first_token_seconds_bucket"
TPOT = "sglang:request_time_per_output_token_seconds_bucket"
FELL = "sglang:dspark_fallbacks_total"
FAILED = f'{FELL}{{reason="draft failed"}}'
LOST = f'{FELL}{{reason="realised gain"}}'
FIRST = '{position="1"}'
HEALTHY: Load = {
    "up": "1x120",
    "sglang:num_running_reqs": "8x120",
    "sglang:num_queue_reqs": "3x120",
    "sglang:realtime_tokens_total": "0+600x120",
    f'{TTFT}{{le="1"}}': "0+60x120",
    f'{TTFT}{{le="20"}}': "0+60x120",
    f'{TTFT}{{le="+Inf"}}': "0+60x120",
    f'{TPOT}{{le="0.1"}}': "0+60x120",
    f'{TPOT}{{le="1"}}': "0+60x120",
    f'{TPOT}{{le="+Inf"}}': "0+60x120",
    LOST: "0x60 0+0.1x60",
    f"sglang:dspark_admitted_drafts_total{FIRST}": "0+100x120",
    f"sglang:dspark_accepted_drafts_total{FIRST}": "0+60x120",
    "sglang:dspark_step_time_error": "0.1x120",
    "sglang:dspark_survival_error": "0.05x120",
}
FIRES: dict[str, list[Load]] = {
    "DSparkServerDown": [{"up": "1x110 0x10"}],
    "DSparkStalled": [{"sglang:realtime_tokens_total": "0+600x100 60000x20"}],
    "DSparkQueueGrows": [{"sglang:num_queue_reqs": "3x100 20x20"}],
    "DSparkFirstTokenLate": [{f'{TTFT}{{le="1"}}': "0x120"}],
    "DSparkTokensSlow": [{f'{TPOT}{{le="0.1"}}': "0x120"}],
    "DSparkDraftingFailed": [{FAILED: "_x115 1x5"}, {FAILED: "1x112 2x8"}],
    "DSparkFallsBackOften": [{LOST: "0+1x120"}],
    "DSparkDraftsRejected": [{f"sglang:dspark_accepted_drafts_total{FIRST}": "0+20x120"}],
    "DSparkStepTimesWrong": [{"sglang:dspark_step_time_error": "0.1x90 0.5x30"}],
    "DSparkConfidenceMisleads": [{"sglang:dspark_survival_error": "0.05x80 0.3x40"}],
}
QUIET: dict[str, Load] = {
    "a healthy server": {},
    "down for a moment": {"up": "1x119 0"},
    "idle": {
        "sglang:num_running_reqs": "0x120",
        "sglang:num_queue_reqs": "0x120",
        "sglang:realtime_tokens_total": "600x120",
        f'{TTFT}{{le="1"}}': "60x120",
        f'{TTFT}{{le="20"}}': "90x120",
        f'{TTFT}{{le="+Inf"}}': "90x120",
    },
    "a queue that passes": {"sglang:num_queue_reqs": "3x115 20x5"},
    "a failure of long ago": {FAILED: "_x60 1x60"},
    "drafts do not pay, and none is verified": {
        f"sglang:dspark_admitted_drafts_total{FIRST}": "100x120",
        f"sglang:dspark_accepted_drafts_total{FIRST}": "10x120",
    },
    "a first start": dict.fromkeys(HEALTHY, "_x119") | {"up": "1x120"},
}


def firing(folder: Path, load: Load) -> set[str]:
    """The alerts that are on after two hours of a load over the healthy one's."""
    series = [{"series": labelled(s), "values": v} for s, v in (HEALTHY | load).items()]
    look = [
        {
            "expr": f'ALERTS{{alertname="{alert.name}", alertstate="firing"}}',
            "eval_time": "2h",
            "exp_samples": [],
        }
        for alert in alerts()
    ]
    test = {
        "rule_files": [str(DEPLOY / "prometheus" / "alerts.yml")],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "promql_expr_test": look}],
    }
    path = folder / "load.yml"
    path.write_text(yaml.safe_dump(test))
    done = subprocess.run(
        ["promtool", "test", "rules", str(path)], capture_output=True, text=True, timeout=60
    )
    said = done.stdout + done.stderr
    on = {alert.name for alert in alerts() if f'alertname="{alert.name}"' in said}
    assert (done.returncode == 0) == (not on), said
    return on


def labelled(series: str) -> str:
    """With the labels that Prometheus gives every series of the server."""
    name, _, more = series.rstrip("}").partition("{")
    ours = 'instance="server:30000", job="dspark"'
    return f"{name}{{{ours}, {more}}}" if more else f"{name}{{{ours}}}"


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)
def test_it_fires_when_it_should_and_alone(tmp_path: Path, alert: Alert) -> None:
    loads = FIRES[alert.name]
    for load in loads:
        assert firing(tmp_path, load) == {alert.name}, load


@pytest.mark.parametrize("name", QUIET)
def test_it_keeps_quiet_otherwise(tmp_path: Path, name: str) -> None:
    assert firing(tmp_path, QUIET[name]) == set()
