"""`dspark bench adaptive`: compare the scheduler with plain decoding and every fixed gamma."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from sglang_dspark.cli._models import (
    DeviceOption,
    ServedDrafterOption,
    ServedTargetOption,
    served_models,
)

if TYPE_CHECKING:
    from rich.console import Console

    from sglang_dspark.loadtest.bench.adaptive import Figure, Journal, Plan
    from sglang_dspark.loadtest.servers.arms import Arm
    from sglang_dspark.loadtest.servers.server import ServerSpec

FULL_USERS, QUICK_USERS = "1,2,4,8,16,32", "1,8"
TRIALS, QUICK_TRIALS = 3, 1
RESULTS = Path("results/adaptive_cpu.json")

QuickOption = Annotated[
    bool, typer.Option("--quick", help="One trial at 1 and 8 users, gamma 2 alone.")
]
TrialsOption = Annotated[
    int | None, typer.Option(min=1, help=f"Default: {TRIALS}; fewer give no interval.")
]
RequestsOption = Annotated[
    int, typer.Option(min=1, help="Requests of a round; two for each user if that is more.")
]
FigureOption = Annotated[
    Path | None, typer.Option(help="Default: figures/NAME.png beside the result file.")
]
ResumeOption = Annotated[
    Path | None, typer.Option(help="Journal of a run that was cut off, to go on with.")
]


def adaptive(
    quick: QuickOption = False,
    concurrency: Annotated[str, typer.Option(help=f"Users at once. Default: {FULL_USERS}.")] = "",
    gammas: Annotated[str, typer.Option(help="Fixed gammas. Default: 1 to the drafter's.")] = "",
    trials: TrialsOption = None,
    mean_tokens: Annotated[int, typer.Option(min=4, help="Mean length of an answer.")] = 56,
    requests: RequestsOption = 6,
    out: Annotated[Path, typer.Option("--json", help="Result file.")] = RESULTS,
    figure: FigureOption = None,
    resume: ResumeOption = None,
    port: Annotated[int, typer.Option(help="First port; each server takes the next.")] = 30000,
    target: ServedTargetOption = "demo",
    drafter: ServedDrafterOption = "shipped",
    device: DeviceOption = "",
) -> None:
    """Measure throughput of plain decoding, each fixed gamma and the scheduler, by concurrency."""
    from rich.console import Console

    from sglang_dspark.cli._progress import says_when_stopped
    from sglang_dspark.loadtest.bench.adaptive import Journal, arms_of
    from sglang_dspark.loadtest.results import require_clean
    from sglang_dspark.loadtest.servers.server import run_directory, stop_on_signals
    from sglang_dspark.loadtest.servers.workload import drafter_gamma

    console = Console(stderr=True, highlight=False)
    users = users_of(concurrency or (QUICK_USERS if quick else FULL_USERS))
    require_clean(out)
    folder, draft, device = served_models(console, target, drafter, device)
    fixed = _gammas(gammas, drafter_gamma(draft), quick)
    run_dir = run_directory()
    served = _Served(folder, draft, device)
    arms = arms_of(fixed, max(users))
    specs = _specs(served, arms, fixed, port, run_dir)
    trials = trials or (QUICK_TRIALS if quick else TRIALS)
    plan = _plan(folder, users, tuple(arm.name for arm in arms), trials, mean_tokens, requests)
    journal = Journal(resume or run_dir / "adaptive.jsonl", _head(served, plan, arms))
    with says_when_stopped(), stop_on_signals():
        _measure(console, specs, plan, journal, run_dir)
    picture = figure or out.parent / "figures" / f"{out.stem}.png"
    _publish(console, served, plan, journal, quick, out, picture)


class _Served(NamedTuple):
    """Target, drafter and device that all arms serve."""

    target: Path
    drafter: Path
    device: str


def _specs(
    served: _Served, arms: list[Arm], fixed: tuple[int, ...], port: int, run_dir: Path
) -> list[ServerSpec]:
    """Return a server for each arm, on free ports."""
    from sglang_dspark.loadtest.bench.adaptive import FIXED, shortened
    from sglang_dspark.ports import require_free_port

    for number in range(len(arms)):
        require_free_port("127.0.0.1", port + number)
    drafters = {f"{FIXED}{gamma}": shortened(served.drafter, gamma, run_dir) for gamma in fixed}
    drafters["dspark"] = served.drafter
    return [
        arm.server(served.target, drafters, port + number, served.device, run_dir)
        for number, arm in enumerate(arms)
    ]


def _head(served: _Served, plan: Plan, arms: list[Arm]) -> dict[str, Any]:
    """Return the facts that the figures in a journal depend on."""
    from sglang_dspark.cli.demo import hardware
    from sglang_dspark.loadtest.bench.journal import served_head

    return {
        "plan": plan.fingerprint(),
        **served_head(served.target, served.drafter, hardware(served.device)),
        "arms": [arm.model_dump(mode="json") for arm in arms],
    }


def _publish(
    console: Console,
    served: _Served,
    plan: Plan,
    journal: Journal,
    quick: bool,
    out: Path,
    picture: Path,
) -> None:
    """Write the result file and its picture, and show the table."""
    from sglang_dspark.cli.demo import hardware
    from sglang_dspark.loadtest.bench import adaptive_results
    from sglang_dspark.loadtest.results import write_results
    from sglang_dspark.loadtest.servers.workload import drafter_gamma

    metrics = {
        "gamma": drafter_gamma(served.drafter),
        "served": f"{served.target.name} with {served.drafter.name}",
        **adaptive_results.as_metrics(journal.figures, plan.concurrency),
        "settings": {
            "trials": plan.trials,
            "mean_tokens": plan.mean_tokens,
            "requests": plan.least,
            "quick": quick,
        },
    }
    write_results(out, out.stem, hardware(served.device), metrics)
    draw(metrics, picture)
    _show(console, metrics)
    console.print(f"written to {out} and {picture}")


def users_of(text: str) -> tuple[int, ...]:
    """Parse the numbers of users in --concurrency. Raises DSparkError if one is below 1."""
    from sglang_dspark.errors import DSparkError

    users = numbers(text, "--concurrency")
    if min(users) < 1:
        raise DSparkError(f"--concurrency {text!r}: at least one user is needed; write 1,4,8")
    return users


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Parse a comma-separated option of whole numbers. Raises DSparkError that names the option."""
    from sglang_dspark.errors import DSparkError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise DSparkError(f"{option} {text!r} is not a list of numbers such as 1,4,8") from None


def _gammas(text: str, block: int, quick: bool) -> tuple[int, ...]:
    """Return the requested fixed gammas; by default all trained ones, or gamma 2 if quick."""
    from sglang_dspark.errors import DSparkError

    if not text:
        return (min(2, block),) if quick else tuple(range(1, block + 1))
    chosen = numbers(text, "--gammas")
    if len(set(chosen)) < len(chosen) or not all(1 <= gamma <= block for gamma in chosen):
        raise DSparkError(f"--gammas {text}: the drafter was trained for 1 to {block}, each once")
    return chosen


def _plan(
    target: Path,
    users: tuple[int, ...],
    arms: tuple[str, ...],
    trials: int,
    mean_tokens: int,
    requests: int,
) -> Plan:
    """Plan with the evaluation set's prompts. The guard was tuned after single runs on some."""
    from sglang_dspark.evaluation.prompts import evaluation_prompts
    from sglang_dspark.loadtest.bench.adaptive import Plan
    from sglang_dspark.loadtest.servers.workload import interleave, render

    prompts = tuple(render(target, prompt) for prompt in interleave(evaluation_prompts()))
    return Plan(prompts, users, arms, trials, mean_tokens, requests)


def _measure(
    console: Console, specs: list[ServerSpec], plan: Plan, journal: Journal, run_dir: Path
) -> None:
    """Start the servers one after the other, freeze each, and measure the missing rounds."""
    from sglang_dspark.cli._progress import stages
    from sglang_dspark.cli.demo import launch
    from sglang_dspark.loadtest.bench.adaptive import measure

    total = len(plan.rounds())
    if len(journal.figures) == total:
        return
    console.print(f"journal: {journal.path}")

    def tell(figure: Figure) -> None:
        progress("measuring", len(journal.figures), total)
        tau = "" if figure.tau is None else f", tau {figure.tau:.2f}"
        console.print(
            f"trial {figure.trial + 1}, {figure.users} users, {figure.arm}: "
            f"{figure.tokens_per_s:.1f} tokens/s{tau}"
        )

    with ExitStack() as stack:
        servers = {}
        for spec in specs:
            servers[spec.name] = stack.enter_context(launch(console, spec, run_dir))
            servers[spec.name].pause()
        progress = stack.enter_context(stages(console))
        measure(servers, plan, journal, tell)


def draw(metrics: dict[str, Any], path: Path) -> None:
    """Write the figure. Raises DSparkError if the file cannot be written."""
    from sglang_dspark.common.atomic_write import replacing
    from sglang_dspark.errors import DSparkError
    from sglang_dspark.loadtest.bench import adaptive_results

    title = ", ".join(filter(None, ("Greedy decoding", metrics.get("served"))))
    try:
        with replacing(path) as temporary:
            adaptive_results.draw(metrics, title).savefig(
                temporary, format="png", dpi=160, metadata={"Software": None}
            )
    except OSError as error:
        raise DSparkError(f"cannot write the figure {path}: {error.strerror}") from error


def _show(console: Console, metrics: dict[str, Any]) -> None:
    from rich import box
    from rich.table import Table

    table = Table(title="Throughput, tokens/s: greedy", box=box.SIMPLE_HEAD)
    for name in ("users", "plain", "best fixed", "scheduled", "over plain", "over best fixed"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in metrics["by_concurrency"]:
        best = row["best_fixed"]
        table.add_row(
            str(row["concurrency"]),
            f"{row['plain']:.1f}",
            f"{row['fixed'][best]:.1f} ({best})",
            f"{row['dspark']:.1f}",
            *(_interval(row[key]) for key in ("over_plain", "over_best_fixed")),
        )
    console.print(table)
    for line in metrics["verdicts"]:
        console.print(line)


def _interval(ratio: dict[str, Any]) -> str:
    if ratio["low"] is None:
        return f"{ratio['mid']:.2f}"
    return f"{ratio['mid']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})"
