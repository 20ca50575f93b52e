"""Test which processes may fork their children, each in a process of its own."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from sglang_dspark.patches.cpu import process_defaults

ASK = "from sglang_dspark.patches.cpu.process_defaults import why_not; print(why_not())"
COMPUTE = "import torch; torch.set_num_threads(2); a = torch.randn(999, 999); a @ a + a; "
PLAIN_THREAD = (
    "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True)"
)


def answer(before: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", before + ASK], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("before", "may"),
    [
        ("import numpy, scipy.linalg; numpy.ones((900, 900)) @ numpy.ones((900, 900)); ", True),
        ("import torch; ", True),
        (COMPUTE, False),
        (f"{PLAIN_THREAD}.start(); ", False),
    ],
    ids=["OpenBLAS", "an import", "OpenMP", "a thread"],
)
def test_a_process_with_threads_of_its_own_spawns(before: str, may: bool) -> None:
    said = answer(before)
    assert (said == "None") is may, said
    assert may or re.fullmatch(r"this process has [2-9] threads already", said)


def test_elsewhere_nothing_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_defaults.sys, "platform", "darwin")
    assert process_defaults.why_not() == "forks are not safe on darwin"


def test_a_child_of_a_fork_computes() -> None:
    """OpenBLAS and OpenMP work in a child of a parent that may fork; a hang ends in a timeout."""
    child = """
import multiprocessing as mp
import numpy, scipy.linalg, torch
from sglang_dspark.patches.cpu.process_defaults import fork_if_safe
numpy.ones((900, 900)) @ numpy.ones((900, 900))
fork_if_safe(None, None)
assert mp.get_start_method() == "fork"
def work(out):
    torch.set_num_threads(2)
    a = torch.ones(900, 900)
    b = numpy.ones((900, 900))
    out.put([float((a @ a + a).max()), float((b @ b).min())])
out = mp.Queue()
process = mp.Process(target=work, args=(out,))
process.start()
print(out.get(timeout=60))
process.join()
"""
    done = subprocess.run(
        [sys.executable, "-c", child], capture_output=True, text=True, timeout=300
    )
    assert done.stdout.strip() == "[901.0, 900.0]", done.stderr[-2000:]
