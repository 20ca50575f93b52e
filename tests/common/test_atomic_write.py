"""Files are there whole or not at all, and their hashes are those of any other program."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
import torch

from sglang_dspark.common.atomic_write import replacing
from sglang_dspark.common.hashes import file_sha256, named_sha256
from sglang_dspark.drafter.checkpoint import write_checkpoint
from sglang_dspark.training.files import write_tensors


@pytest.mark.parametrize("alone", [False, True])
def test_the_file_changes_when_all_of_it_is_written(tmp_path: Path, alone: bool) -> None:
    file = tmp_path / "new" / "file"
    for text in ("first", "second"):
        with replacing(file, alone=alone) as temporary:
            assert temporary.parent == file.parent  # a rename over devices would be a copy
            temporary.write_text(text)
            assert not file.exists() or file.read_text() == "first"
        assert file.read_text() == text
    assert os.listdir(file.parent) == ["file"]


def fill(path: Path, error: BaseException) -> None:
    with replacing(path) as temporary:
        temporary.write_text("half")
        raise error


@pytest.mark.parametrize("error", [OSError("full"), ValueError("not of ours"), KeyboardInterrupt()])
def test_what_fails_leaves_the_earlier_file_alone(tmp_path: Path, error: BaseException) -> None:
    file = tmp_path / "file"
    file.write_text("earlier")
    with pytest.raises(type(error)):
        fill(file, error)
    assert os.listdir(tmp_path) == ["file"]
    assert file.read_text() == "earlier"


@pytest.mark.parametrize(("alone", "same"), [(True, True), (False, False)])
def test_the_next_process_overwrites_what_a_killed_one_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool, same: bool
) -> None:
    """If several processes write one file, each has its own temporary name instead."""
    names = []
    for process in (1, 2):
        monkeypatch.setattr(os, "getpid", lambda process=process: process)
        with replacing(tmp_path / "state", alone=alone) as temporary:
            temporary.write_text("whole")
            names.append(temporary)
    assert (names[0] == names[1]) is same


def test_hashes_are_of_the_bytes_and_where_asked_of_the_names(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    content = bytes(range(256)) * (5 << 12)  # 5 MiB, more than one block
    first.write_bytes(content)
    second.write_bytes(b"")
    done: list[int] = []
    assert file_sha256(first, done.append) == hashlib.sha256(content).hexdigest()
    assert done == [4 << 20, 5 << 20]
    named = hashlib.sha256(b"first" + content + b"second").hexdigest()
    assert named_sha256([first, second]) == named
    assert named_sha256([second, first]) != named


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_files_have_the_permissions_of_new_ones(tmp_path: Path, mask: int) -> None:
    """safetensors writes files that only their owner reads."""
    before = os.umask(mask)
    try:
        write_checkpoint(tmp_path / "drafter", {"a": torch.ones(2)}, {})
        write_tensors(tmp_path / "state.safetensors", {"a": torch.ones(2)}, {})
    finally:
        os.umask(before)
    files = [tmp_path / "drafter" / "model.safetensors", tmp_path / "state.safetensors"]
    assert [file.stat().st_mode & 0o777 for file in files] == [0o666 & ~mask] * 2
    assert os.umask(before) == before, "reading the mask must not change it"
