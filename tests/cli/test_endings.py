"""Test that a command ends without a traceback: stopped, its pipe closed, or the disk full."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sglang_dspark.drafter import save_drafter
from sglang_dspark.drafter.checkpoint import write_checkpoint
from sglang_dspark.errors import DSparkError
from tests.drafter.helpers import tiny_drafter
from tests.signals import heed_signals

COMMAND = [sys.executable, "-m", "sglang_dspark.cli.main"]
FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.is_char_device(), reason="no /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["models", "--help"], ["train"]])
def test_a_full_disk_is_one_line(arguments: list[str]) -> None:
    with FULL.open("w") as full:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=600
        )
    assert done.returncode == 1
    said = "dspark: cannot write the output: No space left on device; free some disk\n"
    assert done.stderr == said


def unread(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, with a stdout whose reader has gone."""
    read, write = os.pipe()
    os.close(read)
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    try:
        return subprocess.run(
            [*COMMAND, *arguments],
            stdout=write,
            stderr=subprocess.PIPE,
            text=True,
            timeout=600,
            env=buffered,
        )
    finally:
        os.close(write)


@pytest.mark.parametrize("arguments", [["--help"], ["models", "--help"], ["train"]])
def test_help_into_a_closed_pipe_is_no_traceback(arguments: list[str]) -> None:
    done = unread(*arguments)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_result_into_a_closed_pipe_is_no_traceback(tmp_path: Path) -> None:
    """It is printed into a buffer, which fails when the command ends."""
    save_drafter(tiny_drafter(), tmp_path / "drafter")
    sizes = {"hidden_size": 32, "vocab_size": 61, "num_hidden_layers": 4}
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(sizes))
    places = [str(tmp_path / name) for name in ("drafter", "target", "out")]
    done = unread("models", "convert", places[0], "--target", places[1], "--out", places[2])
    assert (done.returncode, done.stderr) == (1, "")
    assert (tmp_path / "out" / "config.json").is_file()


def opened(pipe: Path, process: subprocess.Popen[str]) -> int:
    """The pipe's other end, once the command has opened its own: it is inside then."""
    while process.poll() is None:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # no reader yet
            time.sleep(0.05)
    raise AssertionError(f"it ended before it read: {process.communicate()[1]}")


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    """The command waits for a pipe without a writer."""
    pipe = tmp_path / "train.yaml"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [*COMMAND, "train", "--config", str(pipe)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_signals,
    )
    end = opened(pipe, process)
    said = None
    while said is None:  # a signal between opening and reading does not interrupt the read
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            _, said = process.communicate(timeout=20)
    os.close(end)
    assert process.returncode == 130
    assert said == "\ndspark: stopped\n"


def test_a_drafter_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path) -> None:
    drafter = tiny_drafter()
    save_drafter(drafter, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    (tmp_path / "config.json.tmp").mkdir()  # blocks the second file
    with pytest.raises(DSparkError, match=r"cannot write the drafter to .* \(Is a directory\)"):
        write_checkpoint(tmp_path, {"other": drafter.embed_weight}, {})
    (tmp_path / "config.json.tmp").rmdir()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
