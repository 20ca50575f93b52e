"""How a command ends when it is stopped, nobody reads it, or the disk is full: no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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


@pytest.mark.parametrize("arguments", [["--help"], ["models", "--help"], ["train"]])
def test_a_reader_that_has_gone_is_no_traceback(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [*COMMAND, *arguments], stdout=write, stderr=subprocess.PIPE, text=True, timeout=600
    )
    os.close(write)
    assert done.returncode == 1
    assert done.stderr == ""


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    """The command waits for a pipe that nobody writes to."""
    pipe = tmp_path / "train.yaml"
    os.mkfifo(pipe)
    process = subprocess.Popen(
        [*COMMAND, "train", "--config", str(pipe)],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_signals,
    )
    with pipe.open("w"):  # opens when the command does: it is inside then
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=600)
    assert process.returncode == 130
    assert said == "\ndspark: stopped\n"


def test_a_drafter_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path) -> None:
    drafter = tiny_drafter()
    save_drafter(drafter, tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    (tmp_path / "config.json.tmp").mkdir()  # in the way of the second file
    with pytest.raises(DSparkError, match=r"cannot write the drafter to .* \(Is a directory\)"):
        write_checkpoint(tmp_path, {"other": drafter.embed_weight}, {})
    (tmp_path / "config.json.tmp").rmdir()
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
