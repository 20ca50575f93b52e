"""Holes of a heap go back to the system, in a process of its own: its resident set is measured."""

from __future__ import annotations

import subprocess
import sys

import pytest

HOLES = """
import os, sys, threading, time
import torch
from sglang.srt.platforms import current_platform
from sglang_dspark.backends.cpu import platform

def resident():  # MiB
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

platform.TRIM_EVERY_S = 0.05
if "trim" in sys.argv:
    current_platform.init_backend()
    assert threading.active_count() == 1, "a server forks behind this"
    current_platform.post_load_model(None)
    current_platform.post_load_model(None)  # the target's and the draft's, in one process
    assert sum(thread.name == platform.TRIM_THREAD for thread in threading.enumerate()) == 1
tensors = [torch.zeros(16_384) for _ in range(4_096)]  # 64 KiB each: 256 MiB, no mapping of its own
kept = tensors[::64]
before = resident()
del tensors
end = time.monotonic() + float(sys.argv[1])
while resident() > before - 200 and time.monotonic() < end:
    time.sleep(0.05)
assert all(not each.any() for each in kept)
print(before - resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_holes_go_back_to_the_system() -> None:
    assert freed("30", "trim") > 200
    assert freed("1") < 32


def freed(*arguments: str) -> float:
    """MiB that a process with 252 MiB of holes is smaller at its end."""
    run = [sys.executable, "-c", HOLES, *arguments]
    done = subprocess.run(run, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return float(done.stdout)
