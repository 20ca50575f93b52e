"""Patches of an examination are installed as their modules are imported, with the same checks."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

pytest.importorskip("sglang")

from sglang_dspark.patches import late_install
from sglang_dspark.serving import on_demand, released_files

LATE = """
import importlib, sys
from sglang_dspark.patches import registry
from sglang_dspark.serving import on_demand, startup, upstream
with on_demand.examination():
    upstream.load_plugins()
early = set(registry.installed)
assert early, "the patches of loaded modules"
from sglang_dspark.patches import all_seams, late_install
seams = all_seams(device=startup.active_device())
late = [seam for seam in seams if seam not in early]
modules = {late_install._module_of(seam.target) for seam in late}
assert "sglang.srt.managers.scheduler" in modules and not modules & sys.modules.keys()
PART
for module in sorted(modules):
    importlib.import_module(module)
assert set(registry.installed) == set(seams)
registry.verify()
from sglang.srt.speculative import eagle_utils, eagle_worker_common
for module in (eagle_utils, eagle_worker_common):
    assert hasattr(module.eagle_sample, "__wrapped__"), module
print("all installed")
"""


def late(part: str = "") -> subprocess.CompletedProcess[str]:
    """Install all patches late in a process of its own. part: code before the imports."""
    code = LATE.replace("PART", part)
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False
    )


def test_every_patch_is_installed_when_its_module_is_imported() -> None:
    done = late()
    assert done.stdout.endswith("all installed\n"), done.stderr[-3000:]


def test_another_signature_ends_the_process_when_its_module_is_imported() -> None:
    wrong = "object.__setattr__(late[-1], 'signature', '(another)')"
    done = late(f"late.sort(key=lambda seam: seam.name == 'pool-end'); {wrong}")
    assert done.returncode == 1
    assert "sglang-dspark: seam pool-end: " in done.stderr
    assert "should be (another)" in done.stderr


@pytest.mark.parametrize("other", ["plugin", "files", "server"])
def test_patches_wait_only_where_their_targets_are_known(
    monkeypatch: pytest.MonkeyPatch, other: str
) -> None:
    plugins = ["ours"] if other != "plugin" else ["ours", "theirs"]
    monkeypatch.setattr(metadata, "entry_points", lambda group: plugins)
    monkeypatch.setattr(released_files, "are_unchanged", lambda: other != "files")
    monkeypatch.setattr(on_demand, "active", lambda: other != "server")
    assert not late_install.can_wait()
    plugins[1:] = []
    monkeypatch.setattr(released_files, "are_unchanged", lambda: True)
    monkeypatch.setattr(on_demand, "active", lambda: True)
    assert late_install.can_wait()
