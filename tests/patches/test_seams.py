"""Test the real seams on the installed SGLang: each target is as stated, each hook is in place."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sglang_dspark.patches as patches
from sglang_dspark.patches import registry
from sglang_dspark.patches.seam import Seam

SEAMS = patches.all_seams()
WITHOUT_FIXES = patches.all_seams(upstream_fixes=False)
FIXES = tuple(seam for seam in SEAMS if seam not in WITHOUT_FIXES)
THREAD = r"sgl-project/sglang#\d{1,6}|https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+"
ISSUE = re.compile(rf"({THREAD})(, ({THREAD}))*|none found \(\d{{4}}-\d\d-\d\d\)")


def test_every_patch_module_is_listed() -> None:
    root = Path(patches.__file__).parent
    files = {path.relative_to(root) for path in root.glob("*/*.py") if path.stem != "__init__"}
    assert set(patches.patch_modules()) == {".".join(path.with_suffix("").parts) for path in files}
    assert len(SEAMS) >= len(patches.patch_modules())


@pytest.mark.parametrize(
    ("chosen", "folders"),
    [
        ({}, {"cpu", "cuda", "step", "upstream_fixes"}),
        ({"device": "cpu"}, {"cpu", "step", "upstream_fixes"}),
        ({"device": "cuda"}, {"cuda", "step", "upstream_fixes"}),
        ({"device": "none"}, {"step", "upstream_fixes"}),
        ({"device": "cpu", "upstream_fixes": False}, {"cpu", "step"}),
    ],
)
def test_each_server_gets_all_seams_of_its_folders(
    chosen: dict[str, Any], folders: set[str]
) -> None:
    """Read from the modules themselves: a folder that is skipped would leave SGLang's own step."""
    expected = [
        seam.name
        for module in patches.patch_modules()
        if module.split(".")[0] in folders
        for seam in importlib.import_module(f"{patches.__name__}.{module}").SEAMS
    ]
    assert len(expected) > 10
    assert [seam.name for seam in patches.all_seams(**chosen)] == expected


def test_names_are_unique() -> None:
    names = [seam.name for seam in SEAMS]
    assert len(set(names)) == len(names)


def test_no_two_patches_replace_one_target() -> None:
    """The second would silently undo the first."""
    replaced = [seam.target for seam in SEAMS if seam.kind in ("replace", "set")]
    assert len(set(replaced)) == len(replaced)


def test_a_seam_is_for_the_device_of_its_folder() -> None:
    """A server imports the folders of its device, and installs all of their seams."""
    for module in patches.patch_modules():
        folder = module.split(".")[0]
        device = folder if folder in ("cpu", "cuda") else "any"
        seams = importlib.import_module(f"{patches.__name__}.{module}").SEAMS
        assert {seam.device for seam in seams} == {device}, module


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_a_seam_names_its_signature_and_reason(seam: Seam) -> None:
    stated_by = (seam.signature, seam.expected_repr, seam.kind == "subclass")
    assert len([each for each in stated_by if each]) == 1
    assert (seam.kind == "set") == bool(seam.expected_repr)
    assert registry.expectation(seam)
    assert len(seam.why.split()) >= 5
    assert seam.target.startswith(("sglang.", "torch.", "fastapi."))  # the parts of a server


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_the_hook_takes_on_the_installed_sglang(doctor_report: dict[str, Any], seam: Seam) -> None:
    rows = {row["name"]: row for row in doctor_report["seams"]}
    row = rows[seam.name]
    assert row["signature_ok"], f"expected {row['expected']}, found {row['found']}"
    active = doctor_report["device"]["cpu_platform_active"]
    here = "cpu" if active else "cuda"
    assert row["state"] == ("installed" if seam.device in ("any", here) else "inert")


@pytest.mark.parametrize("seam", FIXES, ids=lambda seam: seam.name)
def test_a_fix_of_sglang_names_its_issue_and_its_end(seam: Seam) -> None:
    assert ISSUE.fullmatch(seam.issue), seam.issue
    assert len(seam.drop_when.split()) >= 5


def test_one_switch_is_for_all_fixes_of_sglang() -> None:
    folder = Path(patches.__file__).parent / "upstream_fixes"
    modules = [path for path in folder.glob("*.py") if path.stem != "__init__"]
    assert len(FIXES) >= len(modules)
    assert {seam.name for seam in SEAMS if seam.issue or seam.drop_when} == {
        seam.name for seam in FIXES
    }
    code = (
        "import sys, sglang_dspark.patches as p; p.all_seams(upstream_fixes=False); "
        "print([m for m in sys.modules if m.startswith('sglang_dspark.patches.upstream_fixes.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr[-2000:]


def test_the_readme_names_files_that_exist() -> None:
    root = Path(patches.__file__).resolve().parent
    text = (root / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([\w./-]+(?:\.py|\.md|/))`", text))
    assert {"seam.py", "registry.py", "step/", "cpu/", "cuda/", "upstream_fixes/"} <= named
    repository = root.parent
    assert not [n for n in named if not ((root / n).exists() or (repository / n).exists())]
    (steps,) = re.findall(r"## Add a patch\n\n(.*?)(?:\n## |\Z)", text, re.DOTALL)
    assert len(steps.strip().splitlines()) <= 15
    for field in ("name", "target", "kind", "hook", "signature", "why", "issue", "drop_when"):
        assert f"`{field}`" in steps


def test_without_our_cpu_platform_no_cpu_module_is_imported() -> None:
    code = (
        "import sys, sglang_dspark.patches as p; seams = p.all_seams(device='cuda'); "
        "print(sorted(m for m in sys.modules if m.startswith('sglang_dspark.patches.cpu.'))); "
        "print(sorted({s.device for s in seams}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["[]", "['any', 'cuda']"]
