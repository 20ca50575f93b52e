"""What a CUDA server imports of ours comes without a GPU's help, and finds its seams upstream."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.serving_cuda.on_faked_device"],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert said["is_cuda"], "upstream took the faked device for another one: nothing was tested"
    return said


def test_every_module_of_a_cuda_server_imports(found: dict[str, Any]) -> None:
    assert found["failed"] == {}
    assert {
        "sglang_dspark.serving.step.decode",
        "sglang_dspark.serving.cuda.attach",
        "sglang_dspark.patches.cuda_step",
        "sglang_dspark.kernels.admission",
    } <= set(found["modules"])


def test_cuda_seams_fit_upstreams_cuda_branch(found: dict[str, Any]) -> None:
    assert found["seams"] == []
