"""Runs stages one after the other and keeps what each one found.

A stage that fails, or takes too long, does not end the others; what it said until then is kept as
NAME.partial.json. What it says goes to NAME.lines at once, which is left where the whole run is cut
off. What a stage found is one JSON file, which is its stamp too: it is not run again while its code
and the GPUs are the same, so a call that was cut off goes on where it stopped. A stage may say
itself that it goes on in the next call, as training does.
Standard library only, as on a machine without our packages.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from tools.gpu.files import write_whole
from tools.gpu.kit.archive import CACHES, LOGS, cache_variables, pack_folder
from tools.gpu.kit.needs import waiting
from tools.gpu.kit.stages import GOES_ON, Stage
from tools.gpu.packing.arrival import environment

ROOT = Path(__file__).resolve().parents[3]
_KINDS = (".py", ".yaml", ".json")
_GOES_ON = "it goes on in the next call"


@dataclass(frozen=True)
class Places:
    """kept: folder of what was run before; out: of this call's results; home: of what came in
    pieces and what was made of it (`packing/arrival.py`)."""

    kept: Path
    out: Path
    home: Path


def fingerprint(folders: Sequence[str], root: Path = ROOT) -> str:
    """SHA-256 of the files that decide what a stage finds, and of the GPUs here."""
    found = hashlib.sha256(_gpus().encode())
    for folder in folders:
        for file in sorted(each for each in (root / folder).rglob("*") if each.suffix in _KINDS):
            found.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return found.hexdigest()


def run_stages(
    stages: Sequence[Stage],
    places: Places,
    commit: str,
    say: TextIO = sys.stderr,
    *,
    seconds: float = float("inf"),
    again: bool = True,
) -> list[str]:
    """Run what `places.kept` does not hold yet; names of the stages that failed.

    seconds: how long the call lasts; a stage that may take longer than what is left is not begun.
    again: give the results of stages that were run before, too. A stage whose pieces have not come,
    whose time has, or that goes on in the next call, is neither failed nor done. Those that failed
    before come last: they may take all the time again.
    """
    failed, began = [], time.monotonic()
    for stage in sorted(stages, key=lambda stage: _failed_before(stage, places)):
        path, code = places.kept / f"{stage.name}.json", fingerprint(stage.code)
        left = seconds - (time.monotonic() - began)
        if _stamped(path, code):
            print(f"kit: {stage.name}: done before", file=say, flush=True)
            if again:
                write_whole(places.out / path.name, path.read_bytes())
        elif (lacking := waiting(stage.needs, places.home)) is not None:
            print(f"kit: {stage.name}: {lacking}", file=say, flush=True)
        elif (least := stage.least_s or stage.limit_s) > left:
            why = f"may take {least} s of {left:.0f} left; run it in the next call"
            print(f"kit: {stage.name}: {why}", file=say, flush=True)
        elif not _done(stage, places, {"commit": commit, "fingerprint": code}, left, say):
            failed.append(stage.name)
    return failed


def _gpus() -> str:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    return done.stdout


def _stamped(path: Path, code: str) -> bool:
    """Return whether the stage succeeded with this code; a damaged file counts as none."""
    try:
        return bool(json.loads(path.read_text(encoding="utf-8"))["fingerprint"] == code)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _failed_before(stage: Stage, places: Places) -> bool:
    path = places.kept / f"{stage.name}.failed"
    return path.is_file() and path.read_text() == fingerprint(stage.code)


@dataclass(frozen=True)
class Ended:
    """Output of a stage. why: the reason it is incomplete, None if it is complete."""

    said: str
    why: str | None
    seconds: float

    @property
    def well(self) -> bool:
        """Return whether nothing failed."""
        return self.why in (None, _GOES_ON)


def _done(
    stage: Stage, places: Places, origin: Mapping[str, str], left: float, say: TextIO
) -> bool:
    """Run a stage and write its findings; return whether it succeeded, if only so far."""
    limit = min(stage.limit_s, left)
    print(f"kit: {stage.name}: {stage.about}, {limit:.0f} s at most", file=say, flush=True)
    lines = places.out / f"{stage.name}.lines"
    limits = {"KIT_SECONDS": f"{limit:.0f}", "KIT_FILES": str((places.out / stage.name).absolute())}
    variables = {**environment(places.home), **cache_variables(places.home), **limits}
    done = _run(stage, lines, limit, variables)
    text = json.dumps(_document(stage, done, origin), indent=2) + "\n"
    if done.why is None:
        write_whole(places.kept / f"{stage.name}.json", text)
        write_whole(places.out / f"{stage.name}.json", text)
    else:
        write_whole(places.out / f"{stage.name}.partial.json", text)
    if not done.well:
        write_whole(places.kept / f"{stage.name}.failed", origin["fingerprint"])
    lines.unlink()
    if stage.archives:
        for name in (LOGS, CACHES):
            pack_folder(
                places.home / name, places.out, name, lambda line: print(f"kit: {line}", file=say)
            )
    failed = "" if done.well else "failed: "
    ended = "done" if done.why is None else f"{failed}{done.why}"
    print(f"kit: {stage.name}: {ended} after {done.seconds} s", file=say, flush=True)
    return done.well


def _run(stage: Stage, lines: Path, limit: float, variables: Mapping[str, str]) -> Ended:
    began = time.monotonic()
    command = [sys.executable, "-m", stage.module]
    paths = (str(ROOT), variables.get("PYTHONPATH"), os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(each for each in paths if each)
    lines.parent.mkdir(parents=True, exist_ok=True)
    with (
        lines.open("wb") as said,
        subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **variables, "PYTHONPATH": path},
            stdout=said,
            start_new_session=True,
        ) as child,
    ):
        why: str | None = None
        try:
            child.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # what it started too
            why = f"not done within {limit:.0f} s"
    if why is None and child.returncode == GOES_ON:
        why = _GOES_ON
    elif why is None and child.returncode:
        why = f"it ended with status {child.returncode}"
    text = lines.read_text(encoding="utf-8", errors="replace")
    return Ended(text, why, round(time.monotonic() - began, 1))


def _document(stage: Stage, done: Ended, origin: Mapping[str, str]) -> dict[str, Any]:
    """A result file as `loadtest/results.py` writes them, and which code was run."""
    metrics: dict[str, Any] = {}
    rows = []
    for line in done.said.splitlines():
        try:
            found = json.loads(line)
        except ValueError:  # the last line of a stage that was ended, or a library's chatter
            continue
        if isinstance(found, dict) and "row" in found:
            rows.append(found["row"])
        elif isinstance(found, dict):
            metrics |= found
    return {
        "name": f"gpu_{stage.name}",
        "command": f"tools/gpu/run {stage.name}",
        **origin,
        "device": metrics.pop("device", "unknown"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": done.seconds,
        "incomplete": done.why,
        "metrics": {**metrics, "rows": rows} if rows else metrics,
    }
