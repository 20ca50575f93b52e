"""Measure all figures of the README and of docs/ at one commit: `make figures`.

`python -m tools.figures` runs every part in turn, `python -m tools.figures load sampled` these two,
`--list` names all. A part that is complete at this commit (`runs/figures-COMMIT/PART.done`) is
skipped, so an interrupted run resumes. A full run needs hours on an idle machine.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sglang_dspark.common.files import load_json
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.results import commit

ROOT = Path(__file__).resolve().parents[1]
# Commands start other commands by name, so this environment's are first in PATH.
_ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
PAGES = ("python tools/docs/sweep.py", *(f"python -m tools.docs.{n}" for n in ("screen", "bench")))


@dataclass(frozen=True)
class Part:
    """Commands that write result files.

    minutes: estimate on two cores. results: names in results/. {runs}: a folder of this commit.
    needs: untracked paths; the configuration's first comment gives the commands that make them.
    """

    minutes: int
    results: tuple[str, ...]
    commands: tuple[str, ...]
    needs: tuple[str, ...] = ()


def _sweep(minutes: int, config: str, result: str, *more: str, needs: tuple[str, ...] = ()) -> Part:
    sweep = (
        f"dspark sweep --config {config} --out {{runs}}/{config} --json results/{result}.json "
        "--on-death continue"
    )
    return Part(minutes, (result,), (sweep, *more), needs)


def _bench(minutes: int, result: str, command: str, flag: str = "--json") -> Part:
    return Part(minutes, (result,), (f"dspark bench {command} {flag} results/{result}.json",))


_SCREEN = "dspark bench screen --json results/screen_cpu.json"
_TINY = f"{_SCREEN} --target runs/pair/target --drafter runs/pair/listening --pool-tokens 1408"
_THRESHOLD = "--config tools/screen-threshold.yaml"
_EQUAL = (
    "dspark sweep --config tools/equal-training/sweep.yaml --out {runs}/equal-training "
    "--json results/sweep_equal_training_cpu.json --on-death continue"
)
_DEMO = (
    "python tools/docs/picture.py --title 'make demo' --part '[math-01]' '[math-02]' "
    "--part '[code-01]' '[code-02]' --part '[chat-01]' '[chat-02]' "
    "--part 'DSPARK against plain' 'Steps whose' --part 'DSPARK here' '' docs/demo.svg dspark demo"
)
PARTS: Mapping[str, Part] = {
    "load": _sweep(
        35, "cpu-demo", "sweep_cpu", "dspark report {runs}/cpu-demo --out docs/sweep-cpu-demo.html"
    ),
    "demo": Part(2, (), (_DEMO,)),
    "equal-training": Part(
        15, ("sweep_equal_training_cpu",), (_EQUAL,),
        needs=("runs/equal-training/drafters/smollm2-135m-dspark",),
    ),
    "sampled": _sweep(20, "cpu-demo-sampled", "sweep_sampled_cpu"),
    "burst": _sweep(10, "cpu-burst", "sweep_burst_cpu"),
    "deeper": _sweep(40, "deeper", "sweep_deeper_cpu"),
    "golden": _sweep(
        25, "golden-qwen3-0.6b-reduced", "sweep_golden_reduced_cpu",
        "dspark report {runs}/golden-qwen3-0.6b-reduced --out docs/sweep-golden.html",
    ),
    "headless": _sweep(
        20, "headless", "sweep_headless_cpu",
        needs=("runs/headless/eagle3/drafter", "runs/headless/dflash-dspark"),
    ),
    "gammas": _bench(20, "adaptive_cpu", "adaptive --mean-tokens 40 --gammas 1,2,5 --trials 6"),
    "gammas-few-users": _bench(
        15, "adaptive_few_users_cpu",
        "adaptive --concurrency 1,2 --gammas 2,4,5 --trials 8 --mean-tokens 40",
    ),
    "gammas-many-users": _bench(
        15, "adaptive_many_users_cpu",
        "adaptive --mean-tokens 40 --trials 8 --concurrency 16,32 --gammas 1",
    ),
    "serve": _bench(5, "serve_cpu", "serve --max-new-tokens 64 --repeats 4", "--out"),
    "screen": Part(
        40, ("screen_cpu",),
        (
            "python -m tests.integration.tiny_models runs/pair",
            f"{_TINY} --requests 12096 {_THRESHOLD} --label 'tiny, windows by confidence'",
            f"{_TINY} --requests 1440 --seed 1 --label 'tiny, default scheduler'",
            f"{_SCREEN} --requests 576 --label 'demo, default scheduler'",
            f"{_SCREEN} --requests 576 {_THRESHOLD} --label 'demo, drafts by a threshold'",
        ),
    ),
    "soak": _bench(35, "soak_cpu", "soak --minutes 30 --users 4"),
    "llama": _bench(15, "llama_cpu", "llama --repeats 8"),
    "llama-int8": _bench(
        10, "llama_int8_cpu", "llama --weights int8 --formats q8_0,q4_0 --repeats 6"
    ),
    "llama-two-threads": _bench(
        10, "llama_two_threads_cpu",
        "llama --threads 2 --weights int8 --formats q8_0,q4_0 --repeats 5",
    ),
    "products": _bench(1, "products_cpu", "products"),
    "planner": _bench(2, "planner", "planner", "--out"),
    "regret": _bench(15, "regret_sim", "regret", "--out"),
}  # fmt: skip


def main(
    parts: Annotated[list[str] | None, typer.Argument(help="Parts by name; all if none.")] = None,
    listed: Annotated[bool, typer.Option("--list", help="Name the parts and end.")] = False,
) -> None:
    """Measure parts of the figures at the checkout's commit, and write the pages from them."""
    wrong = sorted(set(parts or ()) - PARTS.keys())
    if wrong:
        raise DSparkError(f"no part {', '.join(wrong)}; there are {', '.join(PARTS)}")
    now = commit()
    for name in parts or PARTS:
        part = PARTS[name]
        if listed:
            print(f"{name}: {part.minutes} minutes{_commits(part)}")
        elif now.endswith("+changes"):
            raise DSparkError("commit the changes first: figures are of one commit")
        elif missing := [path for path in part.needs if not (ROOT / path).exists()]:
            print(f"== {name}: skipped, {', '.join(missing)} missing; see its configuration")
        else:
            _measure(name, part, f"runs/figures-{now[:8]}")


def _measure(name: str, part: Part, runs: str) -> None:
    done = ROOT / runs / f"{name}.done"
    if done.exists():
        print(f"== {name}: already measured at this commit")
        return
    print(f"== {name}: about {part.minutes} minutes", flush=True)
    _run([*part.commands, *PAGES], runs)
    done.parent.mkdir(parents=True, exist_ok=True)
    done.touch()


def _commits(part: Part) -> str:
    files = [ROOT / "results" / f"{name}.json" for name in part.results]
    return "".join(f", results/{file.name} of {_commit_of(file)}" for file in files)


def _commit_of(file: Path) -> str:
    return str(load_json(file).get("commit"))[:8] if file.is_file() else "no commit"


def _run(commands: Sequence[str], runs: str) -> None:
    """Run commands from the repository's root. Raises DSparkError with the first that fails."""
    for command in commands:
        line = command.replace("{runs}", runs)
        print(f"$ {line}", flush=True)
        status = subprocess.run(shlex.split(line), cwd=ROOT, env=_ENVIRONMENT).returncode
        if status:
            raise DSparkError(f"status {status} of {line}; run again to go on from there")


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    try:
        app()
    except DSparkError as error:
        sys.exit(f"figures: {error}")
