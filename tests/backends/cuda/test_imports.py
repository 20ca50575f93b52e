"""Test that our modules of a CUDA server import without a GPU, and find their patch targets."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

# One process: the module computes its results once, slowly.
pytestmark = pytest.mark.xdist_group("imports")


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.cuda.on_faked_device"],
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
        "sglang_dspark.step.decode",
        "sglang_dspark.backends.cuda.attach",
        "sglang_dspark.patches.cuda.step",
        "sglang_dspark.kernels.admission",
        "sglang_dspark.kernels.grouped_moe",
        "sglang_dspark.experts.gpu_backends",
        "sglang_dspark.backends.moe.moe_model",
    } <= set(found["modules"])


def test_the_doctor_says_who_computes_each_format_of_experts(found: dict[str, Any]) -> None:
    """On the faked H100, without the packages that have no build here."""
    said = found["experts"]
    for name in ("bf16", "fp8", "mxfp4", "nvfp4"):
        (own,) = [part for part in said.split("(first that serves ")[1:] if part.startswith(name)]
        assert "not torch: reads counts on the host, which a graph cannot" in own
        assert "not compiled: for CPUs" in own
    assert said.count(" by triton (") == 4
    assert "not deep_gemm: widths 576 x 512 are no multiples of 128" in said
    assert "not flashinfer: flashinfer is not installed" in said


def test_every_name_is_found_on_upstreams_cuda_branch(found: dict[str, Any]) -> None:
    """But where Humming's own package would be needed."""
    needs_a_package = {"sglang.srt.layers.quantization.humming_utils"}
    assert {k: v for k, v in found["names"].items() if k not in needs_a_package} == {}


def test_cuda_seams_fit_upstreams_cuda_branch(found: dict[str, Any]) -> None:
    assert found["seams"] == []
