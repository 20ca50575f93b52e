"""The demo's model with DSPARK and without: whether greedy texts agree, and tokens/s, in pairs.

The rounds of `dspark bench serve`, both servers on one device, the idle one frozen. Rows are
printed as they come, the figures with their ratios at the end. In bfloat16 texts may part where two
tokens are equally likely: `identical` counts those that do not. Without a GPU it runs for a moment
on the CPU, and nothing is said to be measured.
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path

import torch

from sglang_dspark.evaluation.prompts import evaluation_prompts
from sglang_dspark.loadtest.bench.paired import Plan, as_metrics, measure
from sglang_dspark.loadtest.client.load import Round
from sglang_dspark.loadtest.servers.server import ServerProcess
from sglang_dspark.loadtest.servers.workload import drafter_gamma, interleave, render
from sglang_dspark.models.demo import ensure_demo_target
from sglang_dspark.models.drafters import DEMO_DRAFTER, shipped_drafter_path
from sglang_dspark.models.source import GGUF_NAME
from tools.gpu.kit.device import device_name, say
from tools.gpu.kit.servers import figures, serve, server_of
from tools.gpu.packing.arrival import has, kit_home

LOADS = {"cuda": ((1, 8, 32), 3, 128), "cpu": ((1,), 1, 16)}  # users, repeats, answer's tokens
_MEMORY = ("--mem-fraction-static=0.3",)  # of what is free, as there are two servers


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    say(device=device_name(), measured=device == "cuda")
    home = kit_home()
    logs = home / "logs"
    target, drafter = models(home)
    users, repeats, tokens = LOADS[device]
    prompts = tuple(render(target, prompt) for prompt in interleave(evaluation_prompts()))
    plan = Plan(prompts, users, repeats, tokens)
    specs = [
        server_of(arm, target, {"dspark": drafter}, device, users, logs)
        for arm in ("plain", "dspark")
    ]
    if device == "cuda":
        specs = [replace(spec, arguments=(*spec.arguments, *_MEMORY)) for spec in specs]

    def compare(servers: list[ServerProcess]) -> None:
        results = asyncio.run(measure(servers[0], servers[1], plan, tell))
        say(**as_metrics(results, plan, drafter_gamma(drafter)))

    return serve(specs, logs, compare)


def models(home: Path) -> tuple[Path, Path]:
    """Target and drafter: what came in pieces, else the demo's on this machine."""
    if has("smollm", home):
        came = home / "smollm"
        return ensure_demo_target(home / "cache", gguf=came / GGUF_NAME), came / DEMO_DRAFTER
    return ensure_demo_target(), shipped_drafter_path()


def tell(name: str, round_: Round) -> None:
    """Print a round's row."""
    say(row={"server": name, **figures(round_, 0)})


if __name__ == "__main__":
    sys.exit(main())
