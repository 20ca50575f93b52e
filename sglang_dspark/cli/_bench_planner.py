"""`dspark bench planner`: time our planning functions and upstream's, alternating in one run.

`dspark bench regret`: compare scheduling rules with the oracle on simulated loads.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from sglang_dspark.schedule.budget import Costs

ROUNDS = 9


def planner(
    requests: Annotated[int, typer.Option(min=1, help="R, requests in a step.")] = 256,
    gamma: Annotated[int, typer.Option(min=1, max=255, help="Drafts a request.")] = 7,
    calls: Annotated[int, typer.Option(min=1, help="Calls a round.")] = 200,
    out: Annotated[Path, typer.Option(help="Result file.")] = Path("results/planner.json"),
) -> None:
    """Time budget and top-K of one step in microseconds, ours and upstream's two functions."""
    import torch
    from rich.console import Console

    from sglang_dspark.common.machine import cpu_description
    from sglang_dspark.loadtest.results import write_results

    torch.set_num_threads(1)
    timed = _microseconds(_contestants(requests, gamma), calls)
    metrics: dict[str, Any] = {
        "requests": requests,
        "gamma": gamma,
        "calls": calls,
        "rounds": ROUNDS,
        **timed,
    }
    write_results(out, "planner", cpu_description(), metrics)
    console = Console(stderr=True, highlight=False)
    for name, ours, theirs in (
        ("budget", timed["budget_us"], timed["upstream_budget_us"]),
        ("budget over all depths", timed["budget_by_depth_us"], timed["upstream_budget_us"]),
        ("top-K", timed["topk_us"], timed["upstream_topk_us"]),
    ):
        console.print(f"{name}: {ours:.1f} us, upstream {theirs:.1f} us ({theirs / ours:.0f}x)")
    console.print(f"written to {out}")


def _contestants(requests: int, gamma: int) -> dict[str, Callable[[], object]]:
    """Return the functions to time: each maps confidences [R, gamma] to K, or to verify lengths.

    Our budget is timed twice: with equal cost at any draft depth, as upstream assumes, and with a
    higher cost for each position, so that all gamma depths are compared.
    """
    import numpy as np
    import torch

    from sglang_dspark.schedule.admission import admit
    from sglang_dspark.schedule.budget import Workspace, search
    from sglang_dspark.schedule.gains import gains
    from sglang_dspark.serving.upstream_planner import UpstreamPlanner

    confidence = np.random.default_rng(0).beta(8, 2, (requests, gamma)).astype(np.float32)
    costs, deeper = _costs(requests, gamma)
    workspace = Workspace(requests, gamma)
    buffer = np.empty_like(confidence)
    lengths = np.empty(requests, np.int64)
    drafts = search(gains(confidence), costs, workspace).drafts
    upstream = UpstreamPlanner(gamma, costs.tokens)
    tensor = torch.from_numpy(confidence)

    def budget() -> object:
        return search(gains(confidence, out=buffer), costs, workspace)

    def budget_by_depth() -> object:
        return search(gains(confidence, out=buffer), deeper, workspace)

    def topk() -> object:
        return admit(gains(confidence, out=buffer), drafts, workspace, out=lengths)

    return {
        "budget_us": budget,
        "budget_by_depth_us": budget_by_depth,
        "topk_us": topk,
        "upstream_budget_us": lambda: upstream.budget(tensor),
        "upstream_topk_us": lambda: upstream.topk(tensor, drafts),
    }


def _costs(requests: int, gamma: int) -> tuple[Costs, Costs]:
    """Return times with a step at every 64 tokens: drafting cost equal, or rising with depth."""
    import numpy as np

    from sglang_dspark.schedule.budget import Costs

    batch = np.arange(requests * (gamma + 1) + 1)
    tokens = 0.01 + 2e-5 * batch + 3e-4 * (batch // 64)
    same = np.concatenate([[0.0], np.full(gamma, 1e-3)])
    more = np.concatenate([[0.0], 1e-3 + 5e-5 * np.arange(gamma)])
    return Costs(tokens, 1e-3, same), Costs(tokens, 1e-3, more)


def _microseconds(contestants: dict[str, Callable[[], object]], calls: int) -> dict[str, float]:
    """Return the median time of a call; calls alternate, so that all see the same other load."""
    import statistics
    import time

    times: dict[str, list[int]] = {name: [] for name in contestants}
    for call in contestants.values():
        for _ in range(20):
            call()
    for _ in range(ROUNDS):
        for name, call in contestants.items():
            for _ in range(calls):
                start = time.perf_counter_ns()
                call()
                times[name].append(time.perf_counter_ns() - start)
    return {name: statistics.median(values) / 1e3 for name, values in times.items()}


def regret(
    worlds: Annotated[int, typer.Option(min=1, help="Random machines, each with a trace.")] = 200,
    steps: Annotated[int, typer.Option(min=10, help="Steps of a trace.")] = 400,
    seed: Annotated[int, typer.Option(help="Seed of all worlds.")] = 0,
    out: Annotated[Path, typer.Option(help="Result file.")] = Path("results/regret_sim.json"),
) -> None:
    """Measure the regret of each scheduling rule against the oracle, simulated."""
    from rich.console import Console

    from sglang_dspark.cli._progress import says_when_stopped, stages
    from sglang_dspark.common.machine import cpu_description
    from sglang_dspark.loadtest.results import require_clean, write_results
    from sglang_dspark.schedule.simulation.regret import RULES, RegretPlan, measure

    console = Console(stderr=True, highlight=False)
    require_clean(out)
    with says_when_stopped(), stages(console) as progress:
        metrics = measure(
            RegretPlan(worlds, steps, seed=seed), lambda done: progress("worlds", done, worlds)
        )
    write_results(out, "regret_sim", cpu_description(), metrics)
    for rule in RULES:
        by_load, whole = metrics[rule], metrics[rule]["whole_run"]
        console.print(
            f"{rule:>11}: median {by_load['median']:6.2%}, worst {by_load['worst']:6.2%}; of the "
            f"whole run {whole['median']:6.2%}, {whole['worst']:6.2%}"
        )
    console.print(f"written to {out}")
