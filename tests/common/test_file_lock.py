"""Turns of several processes: one at a time, and never lost with who had one."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dspark.common.file_lock import turn

HOLDS = (
    "import sys, time; from pathlib import Path\n"
    "from sglang_dspark.common.file_lock import turn\n"
    "with turn(Path(sys.argv[1]), 60, lambda: None):\n"
    "    print('in', flush=True)\n"
    "    sys.stdin.readline()\n"
    "print('out', flush=True)\n"
    "sys.stdin.readline()\n"
)


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "made" / "by" / "the lock"


def holder(lock: Path) -> subprocess.Popen[str]:
    """A process that is in the block, until it is sent a line."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(lock)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    return process


def test_one_waits_for_the_other(lock: Path) -> None:
    waited: list[str] = []
    with holder(lock) as other:
        assert other.stdin is not None
        stdin = other.stdin

        def leave() -> None:
            waited.append("once")
            stdin.write("\n")
            stdin.flush()

        with turn(lock, 60.0, leave):
            assert other.stdout is not None
            assert other.stdout.readline() == "out\n"
        assert waited == ["once"]
        other.kill()


def test_patience_ends(lock: Path) -> None:
    with holder(lock) as other:
        with pytest.raises(TimeoutError), turn(lock, 0.3, lambda: None):
            pytest.fail("two at a time")
        other.kill()


def test_who_is_killed_has_no_turn(lock: Path) -> None:
    with holder(lock) as other:
        other.send_signal(signal.SIGKILL)
    with turn(lock, 0.0, lambda: pytest.fail("the lock is free")):
        pass


def test_what_is_raised_within_ends_the_turn(lock: Path) -> None:
    with pytest.raises(ZeroDivisionError), turn(lock, 0.0, lambda: None):
        raise ZeroDivisionError
    with turn(lock, 0.0, lambda: pytest.fail("the lock is free")):
        pass


def test_a_place_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError), turn(tmp_path / "file" / "lock", 0.0, lambda: None):
        pass
