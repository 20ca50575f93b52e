"""`python -m tests.mutants.generated`: draw mutants, run the tests on each, print the score.

The first call records which test runs which line (as long as the suite takes). Verdicts are added
to FOLDER/verdicts.jsonl one by one; a call that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sglang_dspark.common.atomic_write import replace_text
from sglang_dspark.errors import DSparkError
from tests.mutants.generated.equivalent import EQUIVALENT
from tests.mutants.generated.judge import Judge, Verdict
from tests.mutants.generated.operators import Site
from tests.mutants.generated.sample import AREAS, all_sites, area_of, drawn
from tests.mutants.generated.tests_of import FOLDERS, Recorded, read_recorded, record
from tests.mutants.tree import ROOT

VERDICTS = "verdicts.jsonl"
OUT = ROOT / "build" / "mutants"


def read_verdicts(path: Path) -> dict[str, Verdict]:
    """The newest verdict on each mutant by its name."""
    if not path.is_file():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {row["name"]: Verdict(**row) for row in rows}


def survivors(sites: Sequence[Site], verdicts: Mapping[str, Verdict]) -> list[Site]:
    """Those judged that no test killed and that are not argued equivalent."""
    return [
        site
        for site in sites
        if site.name in verdicts
        and verdicts[site.name].what != "killed"
        and site.name not in EQUIVALENT
    ]


def judge_all(
    sites: Sequence[Site], out: Path, jobs: int, until: float, files: Sequence[str] = ()
) -> None:
    """Judge these mutants, `jobs` at a time, until `until` on the monotonic clock.

    files: test files to judge by alone, without the record; only kills are added to the verdicts.
    """
    recorded = Recorded() if files else read_recorded(out / "record")
    waiting, lock, console = iter(sites), threading.Lock(), Console(soft_wrap=True)

    def taken() -> Iterator[Site]:
        while time.monotonic() < until:
            with lock:
                site = next(waiting, None)
            if site is None:
                return
            yield site

    def work(folder: Path) -> None:
        judge = Judge(folder, recorded, files or FOLDERS)
        try:
            for site in taken():
                verdict = judge.judge_with(site, files) if files else judge.judge(site)
                if not files or verdict.what == "killed":
                    with lock, (out / VERDICTS).open("a", encoding="utf-8") as file:
                        file.write(json.dumps(asdict(verdict)) + "\n")
                console.print(f"{verdict.what:9} {verdict.name}: {verdict.why}", markup=False)
        finally:
            judge.close()

    with tempfile.TemporaryDirectory(prefix="dspark-mutants-") as folder:
        places = [Path(folder) / str(turn) for turn in range(jobs)]
        with ThreadPoolExecutor(jobs) as threads:
            list(threads.map(work, places))


def score(sites: Sequence[Site], verdicts: Mapping[str, Verdict]) -> dict[str, Counter[str]]:
    """Counts of what became of the mutants, by area; a survivor in EQUIVALENT is `equivalent`."""
    counts: dict[str, Counter[str]] = {area: Counter() for area in AREAS}
    for site in sites:
        if site.name in verdicts:
            what: str = verdicts[site.name].what
            if what != "killed" and site.name in EQUIVALENT:
                what = "equivalent"
            counts[area_of(site.name)][what] += 1
    return counts


def shown(counts: Mapping[str, Counter[str]]) -> Table:
    """The score as a table: killed of those not argued equivalent."""
    table = Table(title="generated mutants")
    columns = ("killed", "survived", "uncovered", "equivalent")
    for column in ("area", *columns, "score"):
        table.add_column(column, justify="left" if column == "area" else "right")
    total: Counter[str] = sum(counts.values(), Counter())
    for area, found in (*counts.items(), ("all", total)):
        judged = found.total() - found["equivalent"]
        share = f"{found['killed'] / judged:.1%}" if judged else "-"
        table.add_row(area, *(str(found[each]) for each in columns), share)
    return table


def main(
    count: Annotated[int, typer.Option(min=1, help="mutants drawn of all areas")] = 1000,
    seed: Annotated[int, typer.Option(help="another draw")] = 1,
    jobs: Annotated[int, typer.Option(min=1, max=2, help="mutants at a time")] = 2,
    minutes: Annotated[float, typer.Option(help="stop after these; the next call goes on")] = 1e6,
    again: Annotated[bool, typer.Option("--again", help="judge survivors anew")] = False,
    files: Annotated[
        list[str] | None, typer.Option("--with", help="judge survivors by this test file alone")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder of the record and the verdicts")] = OUT,
) -> None:
    """Score the tests by mutants drawn at random."""
    try:
        sites = drawn(all_sites(ROOT), count, seed)
        if not files and not (out / "record").is_dir():
            record(out / "record")
        known = read_verdicts(out / VERDICTS)
        left = survivors(sites, known) if files or again else []
        if not files:
            left = [site for site in sites if site.name not in known or site in left]
        judge_all(left, out, jobs, time.monotonic() + 60 * minutes, files or ())
    except DSparkError as error:
        typer.echo(f"mutants: {error}", err=True)
        raise typer.Exit(2) from None
    counts = score(sites, read_verdicts(out / VERDICTS))
    Console().print(shown(counts))
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    result = {
        "command": f"python -m tests.mutants.generated --count {count} --seed {seed}",
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
        "areas": {area: dict(found) for area, found in counts.items()},
        "left": [
            asdict(verdict)
            for verdict in read_verdicts(out / VERDICTS).values()
            if verdict.what != "killed" and verdict.name not in EQUIVALENT
        ],
    }
    replace_text(out / "score.json", json.dumps(result, indent=1) + "\n", "score")


if __name__ == "__main__":
    typer.run(main)
