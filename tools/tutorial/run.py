"""Run the commands of docs/training.md, extracted from the page, from its first block to its last.

Blocks fenced as `sh` run one after the other in one shell, in an empty folder. A block fenced as
`sh server` runs in the background until the next server or the end. So every command of the page is
tested.

    python tools/tutorial/run.py [--json FILE] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

from sglang_dspark.common.machine import cpu_description, with_speed
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.results import commit, now, require_clean, write_document
from sglang_dspark.loadtest.servers.server import stop_on_signals
from sglang_dspark.ports import require_free_port

PAGE = Path(__file__).resolve().parents[2] / "docs" / "training.md"
HOST = "127.0.0.1"
_MARK = "\x1estep "  # begins the script's own lines in its output

# `stop_server` waits because the next server uses the same port. A signal may arrive while the EXIT
# trap stops the server, so the signal trap stops it too.
_PRELUDE = """
set -euo pipefail
server=
stop_server() {
  if [ -n "$server" ]; then
    kill -TERM "$server" 2>/dev/null || true  # it ends the others
    for _ in $(seq 60); do kill -0 -- "-$server" 2>/dev/null || break; sleep 0.5; done
    kill -KILL -- "-$server" 2>/dev/null || true
    server=
  fi
}
wait_for_server() {
  until curl -sf -m 60 "$1" > /dev/null; do
    kill -0 "$server" 2>/dev/null || { tail -n 20 server.log; echo 'the server ended'; exit 1; }
    sleep 1
  done
}
trap stop_server EXIT
trap 'stop_server; exit 130' INT TERM
"""


@dataclass(frozen=True)
class Step:
    """A fenced block. name: its heading. server: it runs until the next server or the end."""

    name: str
    text: str
    line: int
    server: bool


def steps(page: str) -> list[Step]:
    """Extract the `sh` blocks of a Markdown page, in order."""
    found, heading = [], ""
    tokens = MarkdownIt().parse(page)
    for before, token in zip([tokens[0], *tokens], tokens, strict=False):
        if before.type == "heading_open":
            heading = token.content
        if token.type == "fence" and token.info.split()[:1] == ["sh"]:
            assert token.map is not None
            server = "server" in token.info.split()
            found.append(Step(heading, token.content, token.map[0] + 1, server))
    return found


def health_url(found: list[Step]) -> str:
    """Return the health URL of the page's servers; empty if the page calls no server."""
    asked = re.search(rf"http://{re.escape(HOST)}:\d+", "".join(step.text for step in found))
    return f"{asked[0]}/health_generate" if asked else ""


def script(found: list[Step]) -> str:
    """Build one bash script of all steps, which prints a line before each."""
    url, parts = health_url(found), [_PRELUDE]
    for number, step in enumerate(found):
        if step.server:
            parts.append("stop_server\n")  # not a part of the next server's start
        parts.append(f"printf '\\n{_MARK}%d\\n' {number}\n")  # output may lack its last newline
        if step.server:
            command = shlex.quote(f"exec {step.text}")
            parts.append(f"setsid bash -euc {command} > server.log 2>&1 &\n")
            parts.append(f"server=$!\nwait_for_server {url}\n")
        else:
            parts.append(step.text)
    return "".join([*parts, "\nstop_server\n"])


def run(found: list[Step], folder: Path) -> list[float]:
    """Run the steps in `folder`, print their output, and return the seconds of each.

    Raises DSparkError with the block whose command failed.
    """
    if url := health_url(found):
        require_free_port(HOST, int(url.split(":")[2].split("/")[0]))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    began: list[float] = []
    with subprocess.Popen(
        ["bash", "-c", script(found)],
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if line.startswith(_MARK):
                    began.append(time.monotonic())
                    step = found[int(line.removeprefix(_MARK))]
                    line = f"== {step.name} (line {step.line})\n{step.text}--\n"
                print(line, end="", flush=True)
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)  # the group: bash waits for the running step
            process.wait()
            raise
    if process.returncode:
        step = found[len(began) - 1]
        raise DSparkError(f"line {step.line} of the page, {step.name!r}: its command failed")
    return [b - a for a, b in zip(began, [*began[1:], time.monotonic()], strict=True)]


def report(found: list[Step], seconds: list[float], folder: Path) -> dict[str, object]:
    """Return the result file's metrics: seconds of each step, MB on disk of each output folder."""
    places = sorted(p for p in folder.glob("mine/*") if p.name in ("responses", "run"))
    places += sorted(folder.glob("mine/run/drafter"))
    sizes = {p: sum(f.stat().st_size for f in p.rglob("*") if f.is_file()) for p in places}
    return {
        "seconds": round(sum(seconds), 1),
        "steps": [
            {"step": step.name, "command": step.text.split("\n")[0], "seconds": round(s, 1)}
            for step, s in zip(found, seconds, strict=True)
        ],
        "megabytes": {str(p.relative_to(folder)): round(n / 1e6, 1) for p, n in sizes.items()},
    }


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Provide an empty folder; the temporary one is removed at the end, `keep` is not.

    Raises DSparkError if `keep` is not empty."""
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="dspark-tutorial-") as name:
            yield Path(name)
        return
    if keep.exists() and any(keep.iterdir()):
        raise DSparkError(f"{keep} is not empty: the tutorial would go on from what is there")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep


def main() -> None:
    """Run the page; exit with status 1 and one line if a command fails."""
    parser = argparse.ArgumentParser(description="Run the commands of docs/training.md.")
    parser.add_argument("--json", type=Path, help="write seconds and sizes to this file")
    parser.add_argument("--keep", type=Path, help="run in this folder, which stays")
    options = parser.parse_args()
    try:
        require_clean(options.json)
        found = steps(PAGE.read_text(encoding="utf-8"))
        with stop_on_signals(), _folder(options.keep) as folder:
            metrics = report(found, run(found, folder), folder)
        print(f"\ntutorial: {len(found)} steps in {metrics['seconds']} s")
        if options.json:
            _write(options.json, metrics)
    except DSparkError as error:
        sys.exit(f"tutorial: {error}")
    except KeyboardInterrupt:
        print("\ntutorial: stopped; no server is left running", file=sys.stderr)
        sys.exit(130)


def _write(path: Path, metrics: dict[str, object]) -> None:
    document = {
        "name": "tutorial",
        "command": f"python tools/tutorial/run.py {shlex.join(sys.argv[1:])}",
        "commit": commit(),
        "device": with_speed(cpu_description()),
        "date": now(),
        "metrics": metrics,
    }
    write_document(path, document)


if __name__ == "__main__":
    main()
