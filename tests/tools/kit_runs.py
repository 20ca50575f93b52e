"""Run tools/gpu/run in a process of its own, and read the results of its stages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.gpu.kit.stages import STAGES

ROOT = Path(__file__).resolve().parents[2]
KIT = ROOT / "tools" / "gpu"
ALONE = [stage.name for stage in STAGES if not stage.needs]  # without a server


def kit(out: Path, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """tools/gpu/run; its stamps, pieces and what was made of them are written next to `out`."""
    beside = out.parent
    return subprocess.run(
        [KIT / "run", "--out", out, "--stamps", beside, "--pieces", beside / "pieces", *words],
        cwd=beside,
        env={**os.environ, "PYTHON": sys.executable, "KIT_HOME": str(beside / "home")},
        capture_output=True,
        text=True,
        timeout=1800,
    )


def dry_run(out: Path, *stages: str) -> dict[str, dict[str, Any]]:
    """Results of these stages by name, run on this machine."""
    done = kit(out, "--commit", "abc1234", *stages)
    assert done.returncode == 0, done.stderr
    return {file.stem: json.loads(file.read_text()) for file in out.glob("*.json")}
