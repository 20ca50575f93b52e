"""Serve one target of a real model's shape by every arm, and measure all figures of servers.

Servers start once. In order, each result printed at once: checks of the machine; models, while
kernels compile; the scheduled server and plain decoding, started together; right tokens and speed
at every load; then MTP-1 and SGLang's own DSPARK, and rounds of all four in turn, greedy and
sampled; step times and traces; sampled requests of every kind; a target whose layers attend, served
with drafts, of a block and of MTP, and without. A scheduled server that fails is started by the
next rung of `ladder.py`; the other servers are still measured.
Without a GPU a tiny target is served on the CPU, and the output has `measured: false`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.bench.paired import Plan
from sglang_dspark.loadtest.servers.server import ServerProcess, ServerSpec
from sglang_dspark.models.simulated import Shape
from tools.gpu.kit.attending import agreement, passes
from tools.gpu.kit.device import device_name, say, seconds_left
from tools.gpu.kit.ladder import AGAIN_S, READY_S, Ladder
from tools.gpu.kit.models import ATTENDING, ATTENDS, QWEN3_4B, TINY, ready
from tools.gpu.kit.preflight import preflight
from tools.gpu.kit.rounds import SCHEDULED, SETTINGS, Cell, Comparison
from tools.gpu.kit.sampled import sampled
from tools.gpu.kit.servers import Load, prompts, server_of
from tools.gpu.kit.steps import Traced, step_rows, table_of, traced
from tools.gpu.packing.arrival import kit_home

PLAIN = "plain"
LATER = {"cuda": ("mtp1", "upstream-dspark-static"), "cpu": ("mtp1",)}  # SGLang's needs a GPU
REPEATS = 3
LOADS = {
    "cuda": (QWEN3_4B, Load((1, 8, 32, 128), REPEATS, 128, 128), (8, 32)),
    "cpu": (TINY, Load((1, 2), 1, 16, 24), (2,)),
}
TRACES = {
    "cuda": (
        (Cell(1, "greedy"), Cell(64, "greedy"), Cell(8, "T=1")),
        Traced(prompt=32, answer=400, steps=40),
    ),
    "cpu": ((Cell(2, "greedy"),), Traced(prompt=16, answer=200, steps=8)),
}
ATTENDED = (1, 8, 48)
# Several servers share one device: 128 requests of 256 tokens each.
_MEMORY = ("--mem-fraction-static=0.9", "--max-total-tokens=32768")
# Seconds reserved for later parts.
_TRACES_S, _ATTENDING_S, _END_S = 40.0, 90.0, 10.0
_CHAIN_S = 60.0  # for a server of a drafter that runs once a token, if so much is left
_COMPILE_S = 120.0


@dataclass(frozen=True)
class Stage:
    """Parameters of every part of the stage. left: returns the seconds left to it."""

    device: str
    home: Path
    shape: Shape
    load: Load
    left: Callable[[], float]

    @property
    def logs(self) -> Path:
        """Return the folder of server logs, step log and traces."""
        return self.home / "logs"


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape, load, sampled_users = LOADS[device]
    stage = Stage(device, kit_home(), shape, load, seconds_left())
    say(device=device_name(), measured=device == "cuda", shape=asdict(shape), load=asdict(load))
    preflight()
    models = prepare(stage)
    passed = serve_all(stage, models, sampled_users)
    passed &= attend(stage)
    return 0 if passed else 1


def prepare(stage: Stage) -> Path:
    """Build the models while modules are imported and JIT modules compile; return their folder.

    Imports and compilation run as own processes, whose rows go to this stage's output. A process
    that exceeds its time is killed: servers do the remaining work when they start.
    """
    modules = ["tools.gpu.kit.preflight"]
    modules += ["tools.gpu.kit.jit_modules"] if stage.device == "cuda" else []
    running = {each: subprocess.Popen([sys.executable, "-m", each]) for each in modules}
    began = time.monotonic()
    models = ready(stage.home, stage.shape, stage.device)
    ready(stage.home, ATTENDING[stage.device], stage.device, ATTENDS)
    say(models_s=round(time.monotonic() - began, 1))
    for name, process in running.items():
        try:
            status = process.wait(max(1.0, _COMPILE_S - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            process.kill()
            say(row={"preflight": name, "failed": f"not done within {_COMPILE_S:.0f} s"})
        else:
            say(row={"preflight": name, "status": status})
    return models


def serve_all(stage: Stage, models: Path, sampled_users: Sequence[int]) -> bool:
    """Start, measure and stop the servers of the 4B target; return whether all was right."""
    drafters = {"dspark": models / "dspark", "mtp": models / "mtp"}
    specs = {
        arm: _shared(stage, server_of(arm, models / "target", drafters, stage.device,
                                      stage.load.users, stage.logs))
        for arm in (SCHEDULED, PLAIN, *LATER[stage.device])
    }  # fmt: skip
    ladder = Ladder(specs[SCHEDULED], stage.logs, stage.left, _ATTENDING_S)
    servers: dict[str, ServerProcess] = {
        arm: ServerProcess(spec, stage.logs) for arm, spec in specs.items() if arm != SCHEDULED
    }
    follows = np.load(models / "follows.npy")
    load = stage.load
    asked = prompts(load, stage.shape)
    plan = Plan(asked, load.users, load.repeats, load.answer_tokens, load.spread)
    try:
        up = start_two(ladder, servers[PLAIN])
        comparison = Comparison(up, plan, follows, stage.device)
        whole = len(up) == 2
        whole &= measured(comparison, ladder, [Cell(each, "greedy") for each in load.users], 0)
        for arm in LATER[stage.device]:
            servers[arm].start()
        for arm in LATER[stage.device]:
            whole &= add(comparison.up, arm, servers[arm], min(AGAIN_S, stage.left()))
        whole &= repeats(stage, comparison, ladder, sampled_users)
        if SCHEDULED in comparison.up:
            whole &= steps(stage, comparison.up[SCHEDULED], ladder, models / "dspark")
        if {PLAIN, SCHEDULED} <= set(comparison.up) and stage.left() > 2 * _ATTENDING_S:
            whole &= sampled(comparison.up[PLAIN], comparison.up[SCHEDULED], plan, follows)
        return whole and comparison.passed and ladder.is_default
    finally:
        ladder.stop()
        for server in servers.values():
            server.stop()


def start_two(ladder: Ladder, plain: ServerProcess) -> dict[str, ServerProcess]:
    """Start the scheduled server and plain decoding together; return the ready ones, frozen."""
    ladder.begin()
    plain.start()
    up: dict[str, ServerProcess] = {}
    scheduled = ladder.ready()
    if scheduled is not None:
        scheduled.pause()
        up[SCHEDULED] = scheduled
    add(up, PLAIN, plain, READY_S if scheduled is None else AGAIN_S)
    return up


def add(up: dict[str, ServerProcess], arm: str, server: ServerProcess, limit_s: float) -> bool:
    """Wait for a server and freeze it; return whether it is ready. A failure is a row."""
    try:
        seconds = server.wait_ready(max(1.0, limit_s))
    except DSparkError as error:
        lost(arm, server, error)
        return False
    server.pause()
    up[arm] = server
    say(row={"server": arm, "ready_s": round(seconds, 1)})
    return True


def lost(arm: str, server: ServerProcess, error: DSparkError) -> None:
    """Print the row of a server that failed, and stop it."""
    say(row={"server": arm, "failed": str(error), "log": server.log_tail(40)})
    server.stop()


def measured(comparison: Comparison, ladder: Ladder, cells: Sequence[Cell], repeat: int) -> bool:
    """Run the cells once on every server that is up; return whether all survived.

    A scheduled server that dies is restarted one rung down, and its comparison is reset.
    """
    whole = True
    servers = dict(comparison.up)
    for arm, error in comparison.measure(cells, repeat):
        whole = False
        if arm != SCHEDULED:
            lost(arm, servers[arm], error)
            continue
        ladder.fail(error)
        replacement = ladder.ready()
        if replacement is not None:
            replacement.pause()
            comparison.up[SCHEDULED] = replacement
            comparison.restart()
    say(rung=ladder.rung, ratios=comparison.ratios())
    return whole


def repeats(
    stage: Stage, comparison: Comparison, ladder: Ladder, sampled_users: Sequence[int]
) -> bool:
    """Run rounds of all servers until only the time reserved for later parts is left."""
    cells = [Cell(each, "greedy") for each in stage.load.users]
    cells += [Cell(each, kind) for kind in ("T=1", "Qwen3 defaults") for each in sampled_users]
    whole, took, reserve = True, 0.0, _TRACES_S + _ATTENDING_S + _END_S
    for repeat in range(stage.load.repeats):
        if repeat and stage.left() < took + reserve:
            say(row={"repeat": repeat, "failed": f"{stage.left():.0f} s left, a repeat takes "
                     f"{took:.0f} s and {reserve:.0f} s are kept back"})  # fmt: skip
            break
        began = time.monotonic()
        whole &= measured(comparison, ladder, cells, repeat + 1)
        took = time.monotonic() - began
    return whole


def steps(stage: Stage, server: ServerProcess, ladder: Ladder, drafter: Path) -> bool:
    """Print step times by tier and figures of traced steps; return whether all could be read."""
    if not ladder.step_log.is_file():
        say(row={"steps": "none", "why": f"no step log by the rung {ladder.rung!r}"})
        return True
    cells, how = TRACES[stage.device]
    server.resume()
    try:
        for row in step_rows(ladder.step_log, table_of(drafter)):
            say(row=row)
        for cell in cells:
            name = f"traced_{cell.users}" + ("" if cell.sampling == "greedy" else "_sampled")
            say(**{name: traced(server, stage.shape, how, cell.users, SETTINGS[cell.sampling],
                                stage.logs / "traces", stage.device)})  # fmt: skip
    except DSparkError as error:
        say(row={"steps": "failed", "why": str(error)})
        return False
    finally:
        server.pause()
    return True


def attend(stage: Stage) -> bool:
    """Serve the attending target with drafts, of a block and of a chain, and without.

    Returns whether greedy answers agree.
    """
    users, shape = ATTENDED, ATTENDING[stage.device]
    models = ready(stage.home, shape, stage.device, ATTENDS)
    drafters, logs = {"dspark": models / "dspark"}, stage.logs / "attending"
    specs = [
        _shared(stage, server_of(arm, models / "target", drafters, stage.device, users, logs))
        for arm in (SCHEDULED, PLAIN)
    ]
    ladder = Ladder(specs[0], logs, stage.left, _END_S)
    plain = ServerProcess(specs[1], logs)
    try:
        up = start_two(ladder, plain)
        if len(up) < 2:
            return False
        passed = agree(stage, models, up[PLAIN], up[SCHEDULED], "dspark") and ladder.is_default
        ladder.stop()
        if stage.left() < _CHAIN_S:
            say(row={"attending": "none", "drafter": "mtp", "why": f"{stage.left():.0f} s left"})
            return passed
        chain = server_of(
            SCHEDULED, models / "target", {"dspark": models / "mtp"}, stage.device, users, logs
        )
        chained = ServerProcess(replace(_shared(stage, chain), name="mtp-scheduled"), logs)
        try:
            chained.start()
            whole = add(up, chained.spec.name, chained, stage.left() - _END_S)
            return whole and agree(stage, models, up[PLAIN], chained, "mtp") and passed
        finally:
            chained.stop()
    finally:
        ladder.stop()
        plain.stop()


def agree(
    stage: Stage, models: Path, plain: ServerProcess, scheduled: ServerProcess, drafter: str
) -> bool:
    """Print a row for each load of the two servers; return whether their greedy answers agree."""
    rows = []
    for row in agreement(plain, scheduled, models / "target", ATTENDED, stage.device):
        say(row=row | {"drafter": drafter})
        rows.append(row)
        if "failed" in row:
            print(f"attending, {row['attending']} users: {row['failed']}", file=sys.stderr)
    return passes(rows)


def _shared(stage: Stage, spec: ServerSpec) -> ServerSpec:
    """Return the server for a device that several share, with larger chunks of the stream.

    From 32 users on, streams of single tokens measure SGLang's Python, which favours arms that send
    several tokens at once.
    """
    own = _MEMORY if stage.device == "cuda" else ()
    return replace(spec, arguments=(*spec.arguments, *own, "--stream-interval=16"))


if __name__ == "__main__":
    sys.exit(main())
