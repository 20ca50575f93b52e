"""Run stages one after the other and save the results of each.

A stage that fails, or exceeds its time, does not end the others; its output so far is saved as
NAME.partial.json. Output is written to NAME.lines at once, which remains if the whole run is cut
off. The result of a stage is one JSON file, which is its stamp too: the stage is not run again
while its code and the GPUs are the same, so an interrupted call resumes. A stage may itself declare
that it continues in the next call, as training does.
Standard library only: the machine may lack our packages.
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
    """Folders. kept: earlier results; out: this call's results; home: installed parcels and what
    was built from them (`packing/arrival.py`)."""

    kept: Path
    out: Path
    home: Path


def fingerprint(folders: Sequence[str], root: Path = ROOT) -> str:
    """Hash the files that determine a stage's result, and this machine's GPUs, by SHA-256."""
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
    """Run the stages without a result in `places.kept`; return the names of those that failed.

    seconds: length of the call; a stage that may exceed the rest of it is not started. again: write
    the results of earlier runs, too. A stage whose pieces are missing, that has too little time, or
    that continues in the next call, is neither failed nor done. Stages that failed before run last:
    they may use up the time again.
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
    """Return whether the stage succeeded with this code; a damaged file means no."""
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
        """Return whether the stage succeeded, or continues in the next call."""
        return self.why in (None, _GOES_ON)


def _done(
    stage: Stage, places: Places, origin: Mapping[str, str], left: float, say: TextIO
) -> bool:
    """Run a stage and write its results; return whether it succeeded so far."""
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
            os.killpg(child.pid, signal.SIGKILL)  # its children too
            why = f"not done within {limit:.0f} s"
    if why is None and child.returncode == GOES_ON:
        why = _GOES_ON
    elif why is None and child.returncode:
        why = f"it ended with status {child.returncode}"
    text = lines.read_text(encoding="utf-8", errors="replace")
    return Ended(text, why, round(time.monotonic() - began, 1))


def _document(stage: Stage, done: Ended, origin: Mapping[str, str]) -> dict[str, Any]:
    """Build a result file as `loadtest/results.py` does, with the code that was run."""
    metrics: dict[str, Any] = {}
    rows = []
    for line in done.said.splitlines():
        try:
            found = json.loads(line)
        except ValueError:  # the last line of a killed stage, or a library's output
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
