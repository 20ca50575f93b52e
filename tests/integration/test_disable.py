"""`DSPARK_DISABLE=1` and an `SGLANG_PLUGINS` without us leave stock SGLang exactly as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.server

LOOK = """
import json, sys
import sglang
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
from sglang.srt.platforms import current_platform
from sglang.srt.server_args import ServerArgs, prepare_server_args
print("RESULT " + json.dumps({
    "hooks": sorted(HookRegistry._hooks),
    "apply_hooks": HookRegistry.apply_hooks.__func__.__module__,
    "platform": type(current_platform).__module__,
    "patches": sorted(m for m in sys.modules if m.startswith("sglang_dspark.patches")),
    "wrapped": hasattr(prepare_server_args, "__wrapped__"),
    "sgl_kernel": "sgl_kernel" in sys.modules,
    "torchvision": "torchvision" in sys.modules,
}))
"""


def look(**environment: str) -> dict[str, object]:
    """State of a fresh process after SGLang has loaded its plugins."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("DSPARK_DISABLE", "SGLANG_PLUGINS", "SGLANG_USE_CPU_ENGINE")
    }
    done = subprocess.run(
        [sys.executable, "-c", LOOK],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(x for x in done.stdout.splitlines() if x.startswith("RESULT "))
    return json.loads(line.removeprefix("RESULT "))


@pytest.mark.parametrize(
    "switch", [{"DSPARK_DISABLE": "1"}, {"SGLANG_PLUGINS": "some_other_plugin"}]
)
def test_switched_off_means_stock(switch: dict[str, str]) -> None:
    state = look(**switch)
    assert state["hooks"] == []
    assert state["apply_hooks"] == "sglang.srt.plugins.hook_registry"
    assert state["patches"] == []
    assert state["wrapped"] is False
    assert str(state["platform"]).startswith("sglang.")
    assert state["sgl_kernel"] is False
    assert state["torchvision"] is False


def test_on_by_default() -> None:
    """Positive control: the same look finds the hooks when nothing switches them off."""
    state = look()
    assert "sglang.srt.server_args.prepare_server_args" in state["hooks"]
    assert state["wrapped"] is True
