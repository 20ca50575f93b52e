"""The real seams on the installed SGLang: each target is there as stated, each hook takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sglang_dspark.patches as patches
from sglang_dspark.patches.seam import Seam

SEAMS = patches.all_seams()


def test_every_patch_module_is_listed() -> None:
    root = Path(patches.__file__).parent
    files = {path.relative_to(root) for path in root.glob("*/*.py") if path.stem != "__init__"}
    assert set(patches.patch_modules()) == {".".join(path.with_suffix("").parts) for path in files}
    assert len(SEAMS) >= len(patches.patch_modules())


def test_names_are_unique() -> None:
    names = [seam.name for seam in SEAMS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_a_seam_says_what_stands_there_and_why(seam: Seam) -> None:
    assert (seam.signature is None) == (seam.expected_repr is not None)
    assert seam.kind == "set" or seam.signature is not None
    assert len(seam.why.split()) >= 5
    assert seam.target.startswith(("sglang.", "torch.", "fastapi."))  # what SGLang's server is


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.name)
def test_the_hook_takes_on_the_installed_sglang(doctor_report: dict[str, Any], seam: Seam) -> None:
    rows = {row["name"]: row for row in doctor_report["seams"]}
    row = rows[seam.name]
    assert row["signature_ok"], f"expected {row['expected']}, found {row['found']}"
    active = doctor_report["device"]["cpu_platform_active"]
    here = "cpu" if active else "cuda"
    assert row["state"] == ("installed" if seam.device in ("any", here) else "inert")


def test_without_our_cpu_platform_no_cpu_module_is_imported() -> None:
    code = (
        "import sys, sglang_dspark.patches as p; seams = p.all_seams(device='cuda'); "
        "print(sorted(m for m in sys.modules if m.startswith('sglang_dspark.patches.cpu.'))); "
        "print(sorted({s.device for s in seams}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["[]", "['any', 'cuda']"]
