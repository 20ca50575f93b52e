"""`sglang serve MODEL`, SGLang's own command line: our plugin, flag and refusals reach it.

The other tests start servers by `python -m sglang.launch_server`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from sglang_dspark.loadtest.servers.server import ServerProcess, ServerSpec
from tests.integration.serving import (
    CPU_FLAGS,
    DSPARK_FLAGS,
    HOST,
    REQUEST_TIMEOUT_S,
    START_TIMEOUT_S,
    run_to_the_end,
)
from tests.integration.tiny_models import TinyPair
from tests.ports import free_ports

pytestmark = [pytest.mark.server, pytest.mark.xdist_group("sglang-serve")]


@dataclass(frozen=True)
class Serve(ServerSpec):
    """A server as `sglang serve` starts it, the model as a positional argument."""

    def command(self) -> list[str]:
        script = Path(sys.executable).with_name("sglang")
        head = [str(script), "serve", str(self.model)]
        return [*head, "--host", self.host, "--port", str(self.port), *self.arguments]


def spec(pair: TinyPair, config: Path) -> Serve:
    flags = (*CPU_FLAGS, *DSPARK_FLAGS, str(pair.drafter), "--dspark-config", str(config))
    return Serve("serve", pair.target, free_ports(), flags, HOST)


@pytest.mark.slow
def test_the_configuration_reaches_the_scheduler(tiny: TinyPair, tmp_path: Path) -> None:
    config = tmp_path / "dspark.yaml"
    config.write_text("schedule:\n  mode: static\n")
    process = ServerProcess(spec(tiny, config), tmp_path)
    try:
        process.start().wait_ready(START_TIMEOUT_S)
        with httpx.Client(trust_env=False, timeout=REQUEST_TIMEOUT_S) as client:
            body = {"text": "ab", "sampling_params": {"temperature": 0, "max_new_tokens": 24}}
            answer = client.post(f"{process.spec.url}/generate", json=body)
        log = process.log_path.read_text(errors="replace")
    finally:
        process.stop()
    assert answer.status_code == 200, log[-3000:]
    assert answer.json()["meta_info"]["spec_verify_ct"] > 0
    assert "sglang-dspark: mode static (schedule.mode is static)" in log


def test_a_wrong_configuration_is_refused(tiny: TinyPair, tmp_path: Path) -> None:
    config = tmp_path / "dspark.yaml"
    config.write_text("schedule:\n  modus: auto\n")
    ended = run_to_the_end(spec(tiny, config), dict(os.environ), START_TIMEOUT_S)
    assert ended.status != 0
    assert len(ended.ours) == 1, ended.stderr[-3000:]
    assert "unknown field schedule.modus" in ended.ours[0]
    assert ended.leftovers == []
