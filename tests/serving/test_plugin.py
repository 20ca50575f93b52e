"""The entry point that SGLang calls in each of its processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("sglang")

START = """
import gc, json, sys
{before}
during = set()

def watch(phase, info):
    frame = sys._getframe()
    while frame is not None:
        during.add(frame.f_code.co_name)
        frame = frame.f_back

gc.callbacks.append(watch)
from sglang.srt.plugins import load_plugins
load_plugins()
print(json.dumps([gc.isenabled(), gc.get_freeze_count(), sorted(during)]))
"""


@pytest.mark.parametrize("enabled", [True, False])
def test_installing_is_not_interrupted_by_collections(enabled: bool) -> None:
    code = START.format(before="" if enabled else "gc.disable()")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    collecting, frozen, during = json.loads(done.stdout.splitlines()[-1])
    assert collecting == enabled
    assert frozen == 0, "garbage of a process that had run before must stay collectable"
    assert not {"_install", "apply_hooks", "verify"} & set(during), "while patches are installed"
