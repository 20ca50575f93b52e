"""`python -m tests.mutants`: every mutant on a copy of the source, and a table of what killed it.

The tests run without a fault first; a list whose tests fail by themselves proves nothing.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from sglang_dspark.errors import DSparkError
from tests.mutants.catalogue import ALL
from tests.mutants.mutant import Mutant
from tests.mutants.tree import ROOT, TIMEOUT_S, Tree

What = Literal["killed", "equivalent", "survived", "unfit"]
STYLES: dict[What, str] = {
    "killed": "green",
    "equivalent": "cyan",
    "survived": "bold red",
    "unfit": "red",
}
FAILED = 1  # pytest's status: tests ran and some failed
SERVERS_S = 2 * TIMEOUT_S


@dataclass(frozen=True)
class Verdict:
    """Verdict on a mutant. why: the test that failed, or what is wrong."""

    mutant: Mutant
    what: What
    why: str


def judged(tree: Tree, mutant: Mutant) -> Verdict:
    """Run a mutant's tests with its fault in force."""
    missing = [test for test in mutant.tests if not (tree.folder / test.split("::")[0]).is_file()]
    if missing:
        return Verdict(mutant, "survived", f"there is no {missing[0]}")
    with tree.with_fault(mutant):
        ran = tree.pytest(mutant.tests, "-x", timeout_s=SERVERS_S if mutant.server else TIMEOUT_S)
    if mutant.equivalent:
        if ran.status == 0:
            return Verdict(mutant, "equivalent", mutant.equivalent)
        return Verdict(mutant, "unfit", f"called equivalent, but seen by {_first(ran.failed)}")
    if ran.status == 0:
        return Verdict(mutant, "survived", f"{ran.passed} tests passed")
    if ran.status is None:
        return Verdict(mutant, "killed", "no end")
    if ran.status == FAILED and ran.failed:
        return Verdict(mutant, "killed", _first(ran.failed))
    return Verdict(mutant, "unfit", f"no test ran: {' '.join(ran.output.split())[-200:]}")


def _first(failed: Sequence[str]) -> str:
    return failed[0].removeprefix("tests/") if failed else "no test by name"


def check_tests(trees: Sequence[Tree], mutants: Sequence[Mutant]) -> None:
    """Raises DSparkError if a test fails without any fault."""
    tests = sorted({test for each in mutants for test in each.tests})
    shares = [tests[turn :: len(trees)] for turn in range(len(trees))]
    pairs = [(tree, share) for tree, share in zip(trees, shares, strict=True) if share]
    with ThreadPoolExecutor(len(trees)) as threads:
        runs = list(
            threads.map(lambda pair: pair[0].pytest(pair[1], timeout_s=2 * SERVERS_S), pairs)
        )
    for ran in runs:
        if ran.status != 0:
            print(ran.output, file=sys.stderr)
            raise DSparkError(f"without a fault {_first(ran.failed)} fails: fix that first")


def judge_all(trees: Sequence[Tree], mutants: Sequence[Mutant], console: Console) -> list[Verdict]:
    """One mutant after the other on each tree; verdicts in the mutants' order."""
    free: SimpleQueue[Tree] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def judge(mutant: Mutant) -> Verdict:
        tree = free.get()
        try:
            verdict = judged(tree, mutant)
        finally:
            free.put(tree)
        console.print(f"{verdict.what:10} {mutant.name}: {verdict.why}", markup=False)
        return verdict

    with ThreadPoolExecutor(len(trees)) as threads:
        try:
            return list(threads.map(judge, mutants))
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)  # nothing more begins
            raise


def shown(verdicts: Sequence[Verdict]) -> Table:
    """The table, by area."""
    table = Table(title="mutants")
    for column in ("area", "mutant", "outcome", "by"):
        table.add_column(column, overflow="fold")
    for each in sorted(verdicts, key=lambda verdict: verdict.mutant.area):
        mutant = each.mutant
        table.add_row(mutant.area, mutant.name, each.what, each.why, style=STYLES[each.what])
    return table


def chosen(pattern: str, servers: bool) -> list[Mutant]:
    """Mutants whose name or area holds the pattern, those with servers first: they take longest."""
    found = [
        mutant
        for mutant in ALL
        if pattern in f"{mutant.area} {mutant.name}" and (servers or not mutant.server)
    ]
    if not found:
        raise DSparkError(f"no mutant's name or area holds {pattern!r}")
    return sorted(found, key=lambda mutant: not mutant.server)


def run(pattern: str, servers: bool, jobs: int) -> list[Verdict]:
    """Everything; what is going on goes to the console."""
    console = Console(soft_wrap=True)
    mutants = chosen(pattern, servers)
    for mutant in mutants:
        mutant.check(ROOT)
    with tempfile.TemporaryDirectory(prefix="dspark-mutants-") as folder:
        trees = [Tree(Path(folder) / str(turn)) for turn in range(min(jobs, len(mutants)))]
        for tree in trees:
            tree.prove()
        console.print(f"{len(mutants)} mutants; their tests without a fault first")
        check_tests(trees, mutants)
        return judge_all(trees, mutants, console)


def main(
    pattern: Annotated[str, typer.Option("-k", help="only names or areas that hold this")] = "",
    servers: Annotated[bool, typer.Option(help="those whose tests start servers as well")] = True,
    jobs: Annotated[int, typer.Option(min=1, max=2, help="mutants at a time")] = 2,
) -> None:
    """Put every mutant into a copy of the source and see that a test fails."""
    try:
        verdicts = run(pattern, servers, jobs)
    except DSparkError as error:
        typer.echo(f"mutants: {error}", err=True)
        raise typer.Exit(2) from None
    Console(width=160).print(shown(verdicts))
    counts = Counter(verdict.what for verdict in verdicts)
    typer.echo(
        f"{counts['killed']} killed, {counts['equivalent']} equivalent, "
        f"{counts['survived']} harmful survivors, {counts['unfit']} unfit"
    )
    raise typer.Exit(int(counts["survived"] + counts["unfit"] > 0))


if __name__ == "__main__":
    typer.run(main)
