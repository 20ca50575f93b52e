"""Faults inside a server's processes, each armed by a file of the test's while the server runs.

`<folder>/<name>.json` arms a fault: its settings, and `times` that it happens; the file is gone
when it has. The product knows nothing of this: functions are replaced from outside, once, at the
start.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VALUES = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


class Fault:
    """One armed by its file."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = folder / f"{name}.json"

    def armed(self) -> dict[str, Any] | None:
        """Its settings if it is to happen now."""
        try:
            return {"times": 1, **json.loads(self._file.read_text())}
        except FileNotFoundError:
            return None

    def happens(self) -> dict[str, Any] | None:
        """The same, and this was one of its times."""
        settings = self.armed()
        if settings is None:
            return None
        left = int(settings["times"]) - 1
        if left == 0:
            self._file.unlink(missing_ok=True)
        else:
            temporary = self._file.with_suffix(".new")
            temporary.write_text(json.dumps({**settings, "times": left}))
            os.replace(temporary, self._file)
        return settings


def install_faults(folder: Path) -> None:
    """Put every fault in its place; none happens before its file is there."""
    _drafts(folder)
    _confidences(folder)
    _results(folder)
    _stages(folder)
    _clocks(folder)
    _ranks(folder)
    _costs(folder)


def _drafts(folder: Path) -> None:
    from sglang.srt.runtime_context import get_parallel

    from sglang_dspark.backends.cpu.device import HostDevice

    before, behind = Fault(folder, "draft-raises"), Fault(folder, "draft-raises-late")
    follower = Fault(folder, "draft-raises-on-a-follower")
    original = HostDevice.draft

    def draft(self: Any, *args: Any) -> Any:
        if before.happens():
            raise RuntimeError("injected in front of the draft")
        if get_parallel().tp_rank != 0 and follower.happens():
            raise RuntimeError("injected on one rank")
        proposal = original(self, *args)
        if behind.happens():
            raise RuntimeError("injected behind the draft")
        return proposal

    HostDevice.draft = draft  # type: ignore[method-assign]


def _confidences(folder: Path) -> None:
    from sglang_dspark.backends.cpu.device import HostDevice

    fault, original = Fault(folder, "confidence"), HostDevice.admit

    def admit(self: Any, engine: Any, step: Any, logits: Any) -> Any:
        settings = fault.happens() if logits is not None else None
        if settings:
            logits = torch.full_like(logits, VALUES[settings["value"]])
        return original(self, engine, step, logits)

    HostDevice.admit = admit  # type: ignore[method-assign]


def _results(folder: Path) -> None:
    """Results wait for one that comes in time, or never come where they are lost."""
    from sglang_dspark.step.engine import ScheduleEngine

    late, lost = Fault(folder, "results-late"), Fault(folder, "results-lost")
    original, waiting = ScheduleEngine.landed, deque[tuple[Any, ...]]()

    def landed(*args: Any) -> None:
        if lost.happens():
            return
        waiting.append(args)
        if late.happens():
            return
        while waiting:
            original(*waiting.popleft())

    ScheduleEngine.landed = landed  # type: ignore[method-assign]


def _stages(folder: Path) -> None:
    """A stage of `requests` waits `seconds`; `<stage>.entered` is written when it begins to."""
    from sglang_dspark.backends.cpu.device import HostDevice
    from sglang_dspark.step import verify

    for module, name, stage in (
        (HostDevice, "draft", "draft"),
        (verify, "verify", "verify"),
        (HostDevice, "commit", "commit"),
    ):
        setattr(module, name, _waiting(folder, stage, getattr(module, name)))


def _waiting(folder: Path, stage: str, original: Callable[..., Any]) -> Callable[..., Any]:
    fault = Fault(folder, f"{stage}-waits")

    def stops(*args: Any) -> Any:
        armed = fault.armed()
        if armed and _requests(args[1]) == armed["requests"] and (settings := fault.happens()):
            (folder / f"{stage}.entered").touch()
            time.sleep(settings["seconds"])
        return original(*args)

    return stops


def _requests(work: Any) -> int:
    """Of a stage's second argument: upstream's batch, or a pass."""
    return int(work.requests) if hasattr(work, "requests") else len(work.seq_lens)


def _clocks(folder: Path) -> None:
    """The wall clock is off by `seconds` while it is armed; that of steps jumps and stays."""
    from sglang_dspark.step.timing import HostClock

    wall, steps = Fault(folder, "clock-jumps"), Fault(folder, "step-clock-jumps")
    now, mark, jumps = time.time, HostClock.mark, [0.0]

    def shifted() -> float:
        settings = wall.armed()
        return now() + (settings["seconds"] if settings else 0.0)

    def marked(self: HostClock) -> float:
        settings = steps.happens()
        jumps[0] += settings["seconds"] if settings else 0.0
        return mark(self) + jumps[0]

    for module in list(sys.modules.values()):  # SGLang keeps it under other names too
        for name, value in list(vars(module).items()) if module else ():
            if value is now:
                setattr(module, name, shifted)
    HostClock.mark = marked  # type: ignore[method-assign]


def _ranks(folder: Path) -> None:
    """A rank that follows takes its batch for another one."""
    from sglang_dspark.step.ranks import Follower

    fault, original = Fault(folder, "rank-differs"), Follower.begin

    def begin(self: Follower, requests: Any, **options: Any) -> Any:
        if fault.happens():
            requests = requests._replace(rows=requests.rows + 1)
        return original(self, requests, **options)

    Follower.begin = begin  # type: ignore[method-assign]


def _costs(folder: Path) -> None:
    """No fault: `costs-told.json` says what the engine predicts of steps of 1 to 8 requests."""
    from sglang_dspark.schedule.cost_model import Step
    from sglang_dspark.step.engine import ScheduleEngine

    asked, original = Fault(folder, "costs"), ScheduleEngine.begin

    def begin(self: ScheduleEngine, *args: Any, **options: Any) -> Any:
        if asked.happens():
            costs, depth = self.planner.costs, self.gamma
            steps = [Step(n, n * (1 + depth), 64 * n, depth) for n in (1, 2, 4, 8)]
            told = folder / "costs-told.new"
            told.write_text(json.dumps([costs.predict(step) for step in steps]))
            told.rename(folder / "costs-told.json")
        return original(self, *args, **options)

    ScheduleEngine.begin = begin  # type: ignore[method-assign]
