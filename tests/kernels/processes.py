"""Runs a module in a process of its own: whether a kernel is interpreted is decided when triton is
imported.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Of a test that compiles: an H100's most common programs, or every device's and way's.
EVERY = pytest.mark.parametrize("every", [(), pytest.param(("every",), marks=pytest.mark.slow)])


def output_of(module: str, *arguments: str) -> str:
    """Return the output of `python -m module arguments`; it must exit with 0."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
