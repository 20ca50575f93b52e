"""`python -m tests.fuzz`: every family of generated cases, a line each, and what was found.

The exit status is 1 where something was found. `--json` publishes the counts.
"""

from __future__ import annotations

import resource
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from sglang_dspark.common.machine import cpu_description, with_speed
from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.results import commit, now, require_clean, write_document
from tests.fuzz import checkpoints, files, live, recorded, writers
from tests.fuzz.explore import Family, Tally, explore

GROUPS = ("config", "tables", "records", "checkpoints", "writers", "requests")
REQUESTS = 0.1  # of all cases
MOST_ADDRESSES = 24 << 30  # bytes


def counts(families: Sequence[Family], cases: int) -> list[int]:
    """Return the cases of each family, `cases` in all or a few more."""
    shares = sum(each.share for each in families)
    return [max(1, round(cases * each.share / shares + 0.5)) for each in families]


def of_files(groups: Sequence[str], folder: Path) -> list[Family]:
    """Every family of these groups but the requests."""
    made = (
        *files.families(folder / "files"),
        *recorded.families(folder / "recorded"),
        *checkpoints.families(folder / "checkpoints"),
        *writers.families(folder / "writers"),
    )
    return [each for each in made if each.group in groups]


@contextmanager
def at_most_addresses(limit: int) -> Iterator[None]:
    """Limit the address space, so that unbounded growth ends the block and not the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def run(groups: Sequence[str], only: str, cases: int, number: int) -> Iterator[Tally]:
    """Every family of the groups whose name holds `only`, one after the other."""
    with tempfile.TemporaryDirectory(prefix="dspark-fuzz-") as name:
        folder = Path(name)
        served = "requests" in groups
        of_requests = cases if groups == ["requests"] else round(REQUESTS * cases) * served
        made = of_files(groups, folder) if set(groups) - {"requests"} else []
        plain = [each for each in made if only in each.name]
        with at_most_addresses(MOST_ADDRESSES):
            for family, count in zip(plain, counts(plain, cases - of_requests), strict=True):
                yield explore(family, count, number)
        if not served:
            return
        for start in live.SERVERS:
            with start(folder) as server:
                yield from _of_server(server, only, of_requests // len(live.SERVERS), number)


def _of_server(server: live.Live, only: str, cases: int, number: int) -> Iterator[Tally]:
    chosen = [each for each in live.families(server) if only in each.name]
    for family, count in zip(chosen, counts(chosen, cases), strict=True):
        yield explore(family, count, number)


def report(tallies: Sequence[Tally], number: int) -> dict[str, object]:
    """The `metrics` of a result file."""
    live_ones = [each for each in tallies if each.group == "requests"]
    return {
        "seed": number,
        "cases": sum(each.cases for each in tallies),
        "live_requests": sum(each.cases for each in live_ones),
        "findings": sum(len(each.findings) for each in tallies),
        "seconds": round(sum(each.seconds for each in tallies), 1),
        "families": [
            {
                "group": each.group,
                "name": each.name,
                "cases": each.cases,
                "refused": each.refused,
                "accepted": each.accepted,
                "findings": len(each.findings),
                "seconds": round(each.seconds, 1),
            }
            for each in tallies
        ],
    }


def publish(path: Path, metrics: dict[str, object]) -> None:
    """Write a result file."""
    document = {
        "name": path.stem,
        "command": f"python -m tests.fuzz {shlex.join(sys.argv[1:])}".strip(),
        "commit": commit(),
        "device": with_speed(cpu_description()),
        "date": now(),
        "metrics": metrics,
    }
    write_document(path, document)


def main(
    cases: Annotated[int, typer.Option(min=1, help="in all")] = 50_000,
    seed: Annotated[int, typer.Option(help="the same cases for the same number")] = 0,
    only: Annotated[str, typer.Option(help=f"of {','.join(GROUPS)}, comma between")] = "",
    named: Annotated[str, typer.Option("-k", help="families whose name holds this")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="write the counts here")] = None,
) -> None:
    """Generate input of every kind and see what becomes of it."""
    groups = only.split(",") if only else list(GROUPS)
    if unknown := set(groups) - set(GROUPS):
        raise typer.BadParameter(f"no group {', '.join(unknown)}; known: {', '.join(GROUPS)}")
    tallies = []
    try:
        require_clean(json_file)
        for tally in run(groups, named, cases, seed):
            tallies.append(tally)
            typer.echo(tally.line())
            for finding in tally.findings.values():
                typer.echo(f"  {finding}")
        found = report(tallies, seed)
        if json_file is not None:
            publish(json_file, found)
    except DSparkError as error:
        typer.echo(f"fuzz: {error}", err=True)
        raise typer.Exit(2) from None
    counted = f"{found['cases']} cases, {found['live_requests']} of them to a live server"
    typer.echo(f"{counted}; {found['findings']} findings; {found['seconds']} s")
    raise typer.Exit(int(bool(found["findings"])))


if __name__ == "__main__":
    typer.run(main)
