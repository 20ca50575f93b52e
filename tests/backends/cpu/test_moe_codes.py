"""A served drafter with quantised experts keeps codes and scales, and its outputs are unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

pytestmark = pytest.mark.xdist_group("moe-ranks")

ROOT = Path(__file__).resolve().parents[3]
FORMATS = ("fp8", "mxfp4", "nvfp4")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.backends.cpu.moe_codes"]
    done = subprocess.run(
        [*command, str(tmp_path_factory.mktemp("codes"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


@pytest.mark.parametrize("form", FORMATS)
def test_loaded_experts_take_the_bytes_of_codes_and_scales(
    found: dict[str, Any], form: str
) -> None:
    """Routed and shared ones; backends' own copies are no part of the model."""
    assert 0 < found[form]["held"] <= 1.1 * found[form]["stored"]


@pytest.mark.parametrize("form", FORMATS)
def test_passes_are_those_of_the_restored_values(found: dict[str, Any], form: str) -> None:
    """Bitwise, for draft blocks and for more rows than the compiled kernels support."""
    assert found[form]["same"]
    assert found[form]["same_for_many"]
    assert found[form]["shared"] == "SharedRestored", "restored in every call"


@pytest.mark.parametrize("form", FORMATS)
def test_weights_can_be_updated(found: dict[str, Any], form: str) -> None:
    assert found[form]["updated"]


@pytest.mark.parametrize("form", FORMATS)
def test_tensors_that_do_not_fit_are_named(found: dict[str, Any], form: str) -> None:
    name = f"layers.0.mlp.experts.gate_proj ({form}): "
    refused = found[form]["refused"]
    assert refused["no scales"] == name + "scales are missing; the file is incomplete"
    assert refused["scales of others"].startswith(name + "scales are (4, 1, ")
    assert refused["codes of others"].startswith(name + "codes are (4, 254, ")
    assert refused["no codes"].startswith(name + "codes are (4, 256, 64) torch.float32, ")
    for fault in ("codes in an unquantised drafter", "codes alone"):
        assert "names no expert_format" in found[form][fault]
    assert not any("\n" in line for line in refused.values())
