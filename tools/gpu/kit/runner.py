"""Runs stages one after the other and keeps what each one found.

A stage that fails, or takes too long, does not end the others; what it said until then is kept as
NAME.partial.json. What a stage found is one JSON file, which is its stamp too: it is not run again
while its code and the GPUs are the same, so a call that was cut off goes on where it stopped.
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

from tools.gpu.kit.stages import Stage

ROOT = Path(__file__).resolve().parents[3]
_CODE = ("kernels", "sglang_dspark/benchmarks", "sglang_dspark/verify", "tools/gpu/kit")


def fingerprint(root: Path = ROOT) -> str:
    """SHA-256 of every Python file that a stage may run, and of the GPUs here."""
    found = hashlib.sha256(_gpus().encode())
    for folder in _CODE:
        for file in sorted((root / folder).rglob("*.py")):
            found.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return found.hexdigest()


def run_stages(
    stages: Sequence[Stage], kept: Path, out: Path, commit: str, say: TextIO = sys.stderr
) -> list[str]:
    """Run what `kept` does not hold yet; names of the stages that failed.

    kept, out: folders for NAME.json; the second gets every file of these stages, run or kept.
    """
    failed = []
    code = fingerprint()
    for stage in stages:
        path = kept / f"{stage.name}.json"
        if _stamped(path, code):
            print(f"kit: {stage.name}: done before", file=say, flush=True)
            _write(out / path.name, path.read_text(encoding="utf-8"))
            continue
        print(f"kit: {stage.name}: {stage.about}, {stage.limit_s} s at most", file=say, flush=True)
        done = _run(stage)
        document = _document(stage, done, {"commit": commit, "fingerprint": code})
        text = json.dumps(document, indent=2) + "\n"
        if done.why is None:
            _write(path, text)
            _write(out / path.name, text)
        else:
            failed.append(stage.name)
            _write(out / f"{stage.name}.partial.json", text)
        ended = "done" if done.why is None else f"failed: {done.why}"
        print(f"kit: {stage.name}: {ended} after {done.seconds} s", file=say, flush=True)
    return failed


def _gpus() -> str:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "none"
    return done.stdout


def _stamped(path: Path, code: str) -> bool:
    """Whether the stage ended well with this code; a damaged file counts as none."""
    try:
        return bool(json.loads(path.read_text(encoding="utf-8"))["fingerprint"] == code)
    except (OSError, ValueError, KeyError, TypeError):
        return False


@dataclass(frozen=True)
class Ended:
    """What a stage printed, and why that is not all; None: it is. seconds: what it took."""

    said: str
    why: str | None
    seconds: float


def _run(stage: Stage) -> Ended:
    began = time.monotonic()
    command = [sys.executable, "-m", stage.module]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, start_new_session=True
    ) as child:
        try:
            said, why = child.communicate(timeout=stage.limit_s)[0], None
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # what it started too
            said, why = child.communicate()[0], f"not done within {stage.limit_s} s"
    if why is None and child.returncode:
        why = f"it ended with status {child.returncode}"
    return Ended(said.decode(errors="replace"), why, round(time.monotonic() - began, 1))


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


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
