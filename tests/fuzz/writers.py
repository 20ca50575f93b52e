"""Writers cut off: at a byte of their output, by an error or a kill, or by a value that cannot be
written. What stood under the name stays whole, and an error leaves nothing beside it.

The kernel itself cuts: a file may not grow beyond a limit (RLIMIT_FSIZE), which is an error of the
write, or, in a child that leaves the signal alone, its end in the middle of it.
"""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from sglang_dspark.common.atomic_write import replace_text
from sglang_dspark.drafter import save_drafter
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.traces import Trace, write_trace
from sglang_dspark.experts import times
from sglang_dspark.loadtest.client.cell import CellPlan, CellPrompt
from sglang_dspark.loadtest.client.records import Header, Record
from sglang_dspark.loadtest.client.records_file import write_records
from sglang_dspark.loadtest.client.schedule import Arrival, Schedule
from sglang_dspark.loadtest.results import write_document
from sglang_dspark.loadtest.sweep.run_dir import read_summary, write
from sglang_dspark.schedule import cost_table
from sglang_dspark.schedule.sts_file import write_sts
from sglang_dspark.training.files import write_json, write_tensors
from tests.drafter.helpers import tiny_drafter
from tests.evaluation.trace_world import drawn, sts_file
from tests.fuzz.explore import Family
from tests.loadtest.made_run import TABLE, make_run

CHILD_S = 30.0
KEPT = b"what stood there before\n"


@dataclass(frozen=True)
class Writer:
    """write: to a path. unwritable: the same with a value that its form does not have, if there is
    such. files: what it writes, where the path is a folder."""

    write: Callable[[Path], None]
    unwritable: Callable[[Path], None] | None = None
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cut:
    """how: `error`, `kill`, or `value`; share: of the bytes that the whole output takes."""

    how: str
    share: float


class Writing:
    """Write over existing files, and cut the writer off."""

    def __init__(self, folder: Path, writer: Writer):
        self.folder, self.writer = folder, writer
        self.path = folder / "place" if not writer.files else folder
        self.files = [folder / name for name in writer.files] or [self.path]
        folder.mkdir(parents=True)
        self.writer.write(self.path)
        self.size = max(each.stat().st_size for each in self.files)

    def __call__(self, cut: Cut) -> bool:
        for path in self.folder.iterdir():
            path.unlink()
        for path in self.files:
            path.write_bytes(KEPT)
        limit = int(cut.share * self.size)
        if cut.how == "kill":
            assert _killed(lambda: self.writer.write(self.path), limit), "it was not cut off"
        elif cut.how == "value":
            assert self.writer.unwritable is not None
            _refused(lambda: self.writer.unwritable(self.path))  # type: ignore[misc]
        else:
            with _at_most(limit):
                _refused(lambda: self.writer.write(self.path))
        for path in self.files:
            assert path.read_bytes() == KEPT, f"after {cut.how}: {path.name} is not what it was"
        if cut.how != "kill":
            left = {path.name for path in self.folder.iterdir()} - {f.name for f in self.files}
            assert not left, f"after {cut.how}: left behind {sorted(left)}"
        for path in self.folder.iterdir():
            path.unlink()
        self.writer.write(self.path)  # and the next one succeeds
        assert all(path.stat().st_size > 0 for path in self.files)
        return False


def _refused(write: Callable[[], None]) -> None:
    try:
        write()
    except DSparkError as error:
        said = str(error)
    except (TypeError, ValueError):
        return  # of a value that no user gives
    else:
        raise AssertionError("it was not cut off")
    assert said.isprintable(), f"no fit line: {said}"


@contextmanager
def _at_most(limit: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))  # Python ignores the signal: EFBIG
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _killed(write: Callable[[], None], limit: int) -> bool:
    """Return whether a limit of `limit` bytes kills a child that writes."""
    child = os.fork()
    if child == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            write()
        finally:
            os._exit(0)
    deadline = time.monotonic() + CHILD_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXFSZ
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    raise AssertionError("a child that was to be cut off hangs")


def families(folder: Path) -> Iterator[Family]:
    """One a writer; they work below `folder`."""
    for name, writer in _writers(folder).items():
        ways = ("error", "error", "kill", *(("value",) if writer.unwritable else ()))
        shares = st.floats(0, 1, exclude_max=True)
        cuts = st.builds(Cut, st.sampled_from(ways), shares)
        check = Writing(folder / name.replace(" ", "-"), writer)
        yield Family(f"writer of {name}", "writers", cuts, check, 0.15)


def _writers(folder: Path) -> dict[str, Writer]:
    trace = drawn(prompts=2, steps=2, gamma=2)
    odd: Any = object()
    summary = read_summary(make_run(folder / "run", arms=("plain", "dspark"), trials=1))
    tensors = {"a": torch.arange(300.0), "b": torch.ones(7, 9)}
    drafter = tiny_drafter()
    return {
        "step times": Writer(lambda path: cost_table.save(TABLE, path)),
        "calibration": Writer(
            lambda path: write_sts(path, sts_file(3)),
            lambda path: write_sts(path, replace(sts_file(3), versions={"a": odd})),
        ),
        "expert times": Writer(_expert_times),
        "traces": Writer(
            lambda path: write_trace(path, trace), lambda path: write_trace(path, _odd(trace, odd))
        ),
        "results": Writer(
            lambda path: write_document(path, {"metrics": [1.5] * 99}),
            lambda path: write_document(path, {"metrics": float("nan")}),
        ),
        "a sweep": Writer(lambda path: write(path, summary)),
        "a cell": Writer(_cell, _odd_cell),
        "records": Writer(_records),
        "JSON of training": Writer(
            lambda path: write_json(path, list(range(99))), lambda path: write_json(path, odd)
        ),
        "tensors of training": Writer(
            lambda path: write_tensors(path, tensors, {"step": "1"}),
            lambda path: write_tensors(path, tensors, {"step": odd}),
        ),
        "a drafter": Writer(
            lambda path: save_drafter(drafter, path), files=("config.json", "model.safetensors")
        ),
        "a page": Writer(
            lambda path: replace_text(path, "<p>" * 99, "the page"),
            lambda path: replace_text(path, "\ud800", "the page"),
        ),
    }


def _odd(trace: Trace, value: Any) -> Trace:
    return replace(trace, settings={**trace.settings, "seed": value})


def _expert_times(path: Path) -> None:
    key = times.TimesKey("a cpu", "bf16", "4 experts", "float32", False, "1")
    times.save(times.TimesTable(key, "2026", (times.Timing(1, "torch", 5.0),), {}), path)


def _plan(extra: Any) -> CellPlan:
    arrivals = tuple(Arrival(i, 0.5 * i, 0, 4) for i in range(3))
    prompts = (CellPrompt("a", "math", "1 + 1?"),)
    return CellPlan("generate", prompts, Schedule(arrivals, None), extra={"x": extra})


def _cell(path: Path) -> None:
    _plan(1).save(path)


def _odd_cell(path: Path) -> None:
    _plan(object()).save(path)


def _records(path: Path) -> None:
    made = [Record(i, "p", "math", "ok", 0.5, 0.5, 2.0, (1.0, 2.0), (1, 3)) for i in range(9)]
    write_records(path, Header(0, 1, 1e9, "f", {"p50": 0.1}), made)
