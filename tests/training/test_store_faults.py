"""A store whose files are broken: one line that names it, whichever sequence is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.training.store import StoreReader, StoreWriter
from tests.training.helpers import response

META = {"target_sha256": "ab", "layer_ids": [0, 1], "cached": True, "answers": "target"}
SHARD = "shard-00000.safetensors"


@pytest.fixture
def store(tmp_path: Path) -> Path:
    writer = StoreWriter(tmp_path, META)
    for number in range(3):
        writer.add(response(6 + number, 3, number))
    writer.flush()
    assert len(StoreReader(tmp_path)[2].tokens) == 8
    return tmp_path


def _index(store: Path, old: str, new: str) -> None:
    index = store / "index.jsonl"
    assert old in index.read_text()
    index.write_text(index.read_text().replace(old, new))


FAULTS: dict[str, Callable[[Path], object]] = {
    "a shard of nothing": lambda store: (store / SHARD).write_bytes(b""),
    "a shard cut off": lambda store: (store / SHARD).write_bytes(
        (store / SHARD).read_bytes()[:400]
    ),
    "no shard": lambda store: (store / SHARD).unlink(),
    "a row that is a word": lambda store: (store / "index.jsonl").write_text('"r0"\n' * 3),
    "a row of no shard": lambda store: _index(store, '"shard"', '"x"'),
    "a row beyond the shard": lambda store: _index(store, '"i": 2', '"i": 7'),
    "answers that are no pairs": lambda store: _index(store, '"n"', '"answers": [3], "n"'),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line(store: Path, fault: str) -> None:
    FAULTS[fault](store)
    with pytest.raises(DSparkError) as raised:
        StoreReader(store)[2]
    line = str(raised.value)
    assert str(store) in line
    assert "make the store again" in line
    assert line.isprintable()
