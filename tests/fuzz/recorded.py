"""Families of what a run recorded: a sweep's folder and the page made of it, cells and their
requests, traces of the reference engine with an analysis, stores and states of training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from hypothesis import strategies as st

from sglang_dspark.evaluation.analyses import reliability, tau
from sglang_dspark.evaluation.traces import read_trace, write_trace
from sglang_dspark.loadtest.client.cell import CellPlan, CellPrompt
from sglang_dspark.loadtest.client.records import Header, Record
from sglang_dspark.loadtest.client.records_file import read_records, write_records
from sglang_dspark.loadtest.client.schedule import Arrival, Schedule
from sglang_dspark.loadtest.report.data import Run
from sglang_dspark.loadtest.report.page import make_report
from sglang_dspark.training.store import StoreReader, StoreWriter
from tests.evaluation.trace_world import drawn
from tests.fuzz.documents import JSON, LINES, broken, damaged
from tests.fuzz.explore import Family
from tests.fuzz.files import Reading, accepts
from tests.loadtest.made_run import make_run
from tests.training.helpers import response

Named = tuple[str, bytes]  # a file's name below the folder, and what is put there


class Spoiled:
    """A whole folder of which one file at a time is another, and what reads the folder."""

    def __init__(self, folder: Path, read: Callable[[Path], object]):
        self.folder, self.read = folder, read

    def __call__(self, case: Named) -> bool:
        name, content = case
        path = self.folder / name
        kept = path.read_bytes()
        path.write_bytes(content)
        try:
            return accepts(self.read, self.folder, self.folder)
        finally:
            path.write_bytes(kept)


def families(folder: Path) -> Iterator[Family]:
    """They work below `folder`."""
    yield from _sweeps(folder)
    yield from _engine(folder)
    yield from _cells(folder)
    yield from _stores(folder)


def _of(folder: Path, names: Iterator[Path]) -> st.SearchStrategy[Named]:
    """Broken contents of JSON files of a folder."""
    return st.one_of(
        st.tuples(
            st.just(str(path.relative_to(folder))), broken(json.loads(path.read_text()), JSON)
        )
        for path in names
    )


def _sweeps(folder: Path) -> Iterator[Family]:
    run = make_run(folder / "run", arms=("plain", "dspark"), trials=2)
    files = [run / "run.json", run / "summary.json", *sorted((run / "cells").glob("*.json"))[:2]]
    cases = _of(run, iter(files))
    yield Family("sweep's folder", "records", cases, Spoiled(run, Run.read), 2.0)
    yield Family("sweep's report", "records", cases, Spoiled(run, make_report), 0.05, shrinks=False)


def _engine(folder: Path) -> Iterator[Family]:
    place = folder / "trace"
    place.mkdir()
    write_trace(place / "valid.json", drawn(prompts=4, steps=3, gamma=2))
    document = json.loads((place / "valid.json").read_text())
    (place / "valid.json").unlink()

    def analysed(path: Path) -> None:
        trace = read_trace(path)
        tau.compute({str(path): trace})  # what a command calls it
        reliability.compute(str(path), trace, None)

    yield Family("trace", "records", broken(document, JSON), Reading(place, "t.json", analysed))


def _cells(folder: Path) -> Iterator[Family]:
    place = folder / "cell"
    place.mkdir()
    valid = place / "valid"
    prompts = (CellPrompt("a", "math", "1 + 1?"), CellPrompt("b", "chat", [1, 2]))
    arrivals = tuple(Arrival(i, 0.5 * i, i % 2, 4) for i in range(3))
    CellPlan("generate", prompts, Schedule(arrivals, None)).save(valid)
    document = json.loads(valid.read_text())

    def planned(path: Path) -> None:
        plan = CellPlan.load(path)
        for arrival in plan.schedule.arrivals:
            plan.body(arrival)

    yield Family("cell plan", "records", broken(document, JSON), Reading(place, "plan", planned))
    records = [
        Record(i, "p", "math", "ok", 0.5 * i, 0.5 * i, 2.0 + i, (1.0 + i, 2.0 + i), (1, 3))
        for i in range(3)
    ]
    write_records(valid, Header(0, 1, 1e9, "f", {"p50": 0.1}), records)
    content = valid.read_bytes()
    place = folder / "records"
    place.mkdir()

    def recorded(path: Path) -> None:
        for record in read_records(path)[1]:
            assert record.index >= -(2**63)

    yield Family("records", "records", damaged(content), Reading(place, "r.parquet", recorded))


def _stores(folder: Path) -> Iterator[Family]:
    whole = folder / "store"
    meta = {"target_sha256": "ab", "layer_ids": [0, 1], "cached": True, "answers": "target"}
    writer = StoreWriter(whole, meta)
    for number in range(3):
        writer.add(response(6 + number, 3, number))
    writer.flush()
    index = [json.loads(line) for line in (whole / "index.jsonl").read_text().splitlines()]
    shard = next(whole.glob("*.safetensors"))
    cases = st.one_of(
        _of(whole, iter([whole / "meta.json"])),
        st.tuples(st.just("index.jsonl"), broken(index, LINES)),
        st.tuples(st.just(shard.name), damaged(shard.read_bytes())),
    )

    def read(path: Path) -> None:
        store = StoreReader(path)
        for number in range(len(store)):
            found = store[number]
            assert len(found.features) == len(found.tokens)
            assert store.answers(number)

    yield Family("response store", "records", cases, Spoiled(whole, read))
