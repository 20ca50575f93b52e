"""Weights share pieces of memory on huge pages and do not meet in them."""

from __future__ import annotations

import gc
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang_dspark.backends.cpu import weight_formats
from sglang_dspark.backends.cpu.weight_formats import (
    BYTES,
    INT8,
    PAGE,
    PIECE,
    huge_page_bytes,
    pack,
)


def lines_of(address: int) -> dict[str, str]:
    """Return the kernel's fields of the mapping that holds an address."""
    here = False
    found = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(":" if line[0].isupper() else " ")
        if "-" in name:
            first, end = (int(part, 16) for part in name.split("-"))
            here = first <= address < end
        elif here:
            found[name] = rest.strip()
    return found


def mapping_of(memory: Any) -> Any:
    """Return the memory map that holds an array."""
    while isinstance(memory, np.ndarray | memoryview):
        memory = memory.obj if isinstance(memory, memoryview) else memory.base
    return memory


@pytest.mark.parametrize("size", [1, 64, 65, 331_776, PAGE, PIECE, PIECE + 1])
def test_each_has_its_own_bytes(size: int) -> None:
    taken = [huge_page_bytes(size) for _ in range(3)]
    for number, each in enumerate(taken):
        each.fill_(number)
    for number, each in enumerate(taken):
        assert each.data_ptr() % 64 == 0
        assert each.untyped_storage().nbytes() == size
        assert each.storage_offset() == 0
        assert bool((each == number).all())


def test_nothing_is_skipped_between_two() -> None:
    first = huge_page_bytes(PIECE)  # a piece of its own
    assert first.data_ptr() % PAGE == 0
    second, third = huge_page_bytes(65), huge_page_bytes(64)
    assert third.data_ptr() - second.data_ptr() == 128


class _Slow(np.ndarray[Any, Any]):
    """Others have their turn while a part of it is taken."""

    def __getitem__(self, where: Any) -> Any:
        found = super().__getitem__(where)
        time.sleep(0.01)
        return found


def test_threads_that_take_at_once_get_places_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = list[int]()
    monkeypatch.setattr(weight_formats, "_left", np.zeros(4096, np.uint8).view(_Slow))
    each = [
        threading.Thread(target=lambda: found.append(huge_page_bytes(64).data_ptr()))
        for _ in range(8)
    ]
    for one in each:
        one.start()
    for one in each:
        one.join()
    assert len(set(found)) == 8


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own account")
@pytest.mark.parametrize("form", [INT8, BYTES], ids=["pairs", "fours"])
def test_packed_weights_ask_for_huge_pages(form: object) -> None:
    weight = pack(torch.randn(48, 192), form)  # type: ignore[arg-type]
    assert "hg" in lines_of(weight.data_ptr())["VmFlags"].split()


def test_a_piece_goes_with_its_last_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    made, new_piece = [], weight_formats._new_piece
    monkeypatch.setattr(weight_formats, "_left", np.empty(0, np.uint8))

    def recorded(size: int) -> Any:
        memory = new_piece(size)
        made.append(weakref.ref(mapping_of(memory)))
        return memory

    monkeypatch.setattr(weight_formats, "_new_piece", recorded)
    first, last = huge_page_bytes(PIECE // 2), huge_page_bytes(PIECE // 2)
    (piece,) = made
    huge_page_bytes(1)  # from the next one
    del first
    gc.collect()
    assert piece() is not None
    del last
    gc.collect()
    assert piece() is None
