"""Start servers on the faked GPU one after the other and list what each compiles.

    tools/gpu/faked/python -m tools.gpu.faked.rehearse [ARM...]

Each arm of `configs/serve` serves a small made-up target with the kit's flags and gets requests of
every kind (`kit/sampled.py`) that it supports without FlashInfer. A JSON row per arm has the JIT
modules with their factories and seconds, the Triton kernels and the kinds of requests without an
answer. Answers are noise.
Status 1: a server did not start, a kind was not answered or a kernel did not compile.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.servers.server import ServerProcess
from sglang_dspark.models.drafters import shipped_drafter_path
from sglang_dspark.models.simulated import SHAPES
from tools.gpu.faked.small_shapes import small
from tools.gpu.kit.models import ready
from tools.gpu.kit.runs import demo_target
from tools.gpu.kit.sampled import KINDS, MIXED
from tools.gpu.kit.servers import server_of
from tools.gpu.packing.arrival import kit_home

SMOLLM = "smollm"
ARMS = ("plain", "dspark", "mtp1", "upstream-dspark-static")
# Without FlashInfer, which is not sent, requests of these kinds end the server.
_FLASHINFER = {
    "mtp1": {*KINDS, MIXED} - {"greedy"},
    "upstream-dspark-static": {kind for kind, asked in KINDS.items() if "top_p" in asked} | {MIXED},
}
USERS, TOKENS = (4,), 24
PROMPT = 80  # tokens: SGLang replays a prefill graph of 128 tokens from 64 on
_POOL = "--max-total-tokens=8192"  # the pool is in this machine's memory
_READY_S = 900.0  # two cores compile for minutes
_ANSWER_S = 300.0
_COMPILED = re.compile(r"TRITON compiled (\S+)")
_FAILED = re.compile(r"(?:TRITON|JIT) FAILED .*")
_BUILT = re.compile(r"JIT built (\(.*?\)) by (\S+\.[\w]+\(.*\)) in ([\d.]+) s")


def main() -> int:
    """Print one row per arm; return 1 if any row has a fault."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("arms", nargs="*", metavar="ARM", default=ARMS)
    parser.add_argument(
        "--shape",
        choices=(*SHAPES, SMOLLM),
        default="qwen3-4b",
        help="whose hidden size and heads are served; smollm: the demo's model",
    )
    parser.add_argument("--vocab", type=int, default=1024, help="of a made-up target")
    parser.add_argument("--logs", type=Path, default=kit_home() / "logs" / "faked")
    options = parser.parse_args()
    if options.shape == SMOLLM:
        target, dspark = demo_target(kit_home()), shipped_drafter_path()
        drafters = {"dspark": dspark}
    else:
        shape = small(SHAPES[options.shape], vocab=options.vocab)
        folder = ready(kit_home(), shape, "cpu")
        target = folder / "target"
        drafters = {"dspark": folder / "dspark", "mtp": folder / "mtp"}
    sound = True
    for arm in options.arms:
        row = rehearsed(arm, target, drafters, options.logs)
        print(json.dumps({"row": row}), flush=True)
        sound &= not (row["failed"] or row["unanswered"])
    return 0 if sound else 1


def rehearsed(arm: str, target: Path, drafters: dict[str, Path], logs: Path) -> dict[str, Any]:
    """Start the arm's server, send requests and return the arm's row."""
    spec = server_of(arm, target, drafters, "cuda", USERS, logs)
    server = ServerProcess(replace(spec, arguments=(*spec.arguments, _POOL)), logs)
    row: dict[str, Any] = {"arm": arm, "ready_s": None, "unanswered": {}, "failed": []}
    try:
        with server.start():
            row["ready_s"] = round(server.wait_ready(_READY_S), 1)
            kinds = [kind for kind in (*KINDS, MIXED) if kind not in _FLASHINFER.get(arm, ())]
            row["unanswered"] = unanswered(server.spec.url, kinds)
    except DSparkError as error:
        row["failed"].append(str(error))
    log = server.log_path.read_text(encoding="utf-8", errors="replace")
    return {**row, **compiled(log), "failed": row["failed"] + _FAILED.findall(log)}


def unanswered(url: str, kinds: Sequence[str]) -> dict[str, str]:
    """Send a batch of each kind; return the kinds without an answer, with the reason."""
    found: dict[str, str] = {}
    first = count(5)  # first tokens differ, so that no prompt is cached
    for kind in kinds:
        asked = list(KINDS.values()) if kind == MIXED else [KINDS[kind]] * max(USERS)
        body = {
            "input_ids": [[next(first), *range(100, 99 + PROMPT)] for _ in asked],
            "sampling_params": [
                {"max_new_tokens": TOKENS, "ignore_eos": True, **each} for each in asked
            ],
        }
        began = time.monotonic()
        try:
            with httpx.Client(trust_env=False, timeout=_ANSWER_S) as client:
                answer = client.post(f"{url}/generate", json=body)
            if answer.status_code != 200:
                found[kind] = f"{answer.status_code}: {answer.text[:200]}"
        except httpx.HTTPError as error:
            found[kind] = f"{error!r} after {time.monotonic() - began:.0f} s"
    return found


def compiled(log: str) -> dict[str, Any]:
    """Read JIT modules and names of Triton kernels that were compiled from a server's log."""
    modules = {name: (call, float(seconds)) for name, call, seconds in _BUILT.findall(log)}
    return {
        "jit": [
            {"jit": name, "factory": call, "seconds": seconds}
            for name, (call, seconds) in modules.items()
        ],
        "triton": sorted(set(_COMPILED.findall(log))),
    }


if __name__ == "__main__":
    sys.exit(main())
