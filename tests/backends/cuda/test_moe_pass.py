"""The served model with experts on the path of a GPU: the CPU's numbers, nothing for the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

# One process: the module computes its results once, slowly.
pytestmark = pytest.mark.xdist_group("moe-pass")

pytest.importorskip("sglang")

ROUNDING = 1e-5  # of float32 sums in another order; 1.5e-7 is seen
COARSE = 0.3  # of bfloat16, in which a token may go to another expert; 0.09 is seen


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("moe-pass")
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.cuda.moe_pass", str(folder)],
        env={**os.environ, "XDG_CACHE_HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_hidden_states_are_the_cpu_paths(said: dict[str, Any]) -> None:
    assert said["float32"] < ROUNDING
    assert said["bfloat16"] < COARSE


def test_routing_and_mixing_stay_in_float32(said: dict[str, Any]) -> None:
    dtypes = said["dtypes"]
    assert dtypes.pop("h") == dtypes.pop("experts") == "torch.bfloat16"
    assert set(dtypes.values()) == {"torch.float32"}


def test_the_pass_asks_the_host_for_nothing(said: dict[str, Any]) -> None:
    """But where experts are computed by torch, which counts rows there: the test can fail."""
    assert said["without experts"] == "(12, 64)"
    assert said["with experts by torch"] == "DSparkError"
