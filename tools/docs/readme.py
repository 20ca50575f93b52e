"""The README's table of results, written from the sweep's JSON so that the two cannot differ.

`python tools/docs/readme.py` rewrites what stands between the two marks in README.md; `make
figures` runs it behind the sweep. All rows are of one run: one commit, machine and drafter.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_dspark.errors import DSparkError
from sglang_dspark.files import load_json, reading, replace_text

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
RESULTS = ROOT / "results" / "sweep_cpu.json"
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
HEAD = (
    "| users at once | plain, tokens/s | MTP-1 | DSpark | over plain (95%) | over MTP-1 (95%) |",
    "|---|---|---|---|---|---|",
)


def section(document: Mapping[str, Any]) -> str:
    """Table and its source, of a result file of `dspark sweep`. Raises LookupError on another."""
    metrics = document["metrics"]
    matched = metrics["matched_speed_ratio_vs_mtp1"]
    mix = metrics["mix"].replace(",", ", ")
    lines = [*HEAD, *(_row(metrics, row) for row in metrics["by_concurrency"]), ""]
    lines += [
        f"At the throughput that MTP-1 reaches, a DSpark user is {_ratio(matched)} times as fast.",
        f"Prompts: {mix}; {metrics['trials']} trials; {document['device']};",
        f"commit {metrics['sweep_commit'][:7]}; {document['date'][:10]}; `make figures`;",
        "[results/sweep_cpu.json](results/sweep_cpu.json).",
    ]
    return "\n".join(lines)


def rewritten(readme: str, table: str) -> str:
    """The README with `table` between its marks. Raises DSparkError where a mark is missing."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise DSparkError(f"README.md must have {BEGIN} and {END} once each")
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.split(END)[1]}"


def _row(metrics: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    users = row["concurrency"]
    speeds = [f"{row[arm]['tokens_per_s']['mid']:.0f}" for arm in ("plain", "mtp1", "dspark")]
    ratios = [
        _ratio(each)
        for under in ("plain", "mtp1")
        for each in metrics["ratios"]
        if (each["over"], each["under"]) == ("dspark", under)
        and (each["what"], each["loop"], each["level"]) == ("tokens_per_s", "closed", users)
    ]
    plain, mtp1, dspark = speeds
    over_plain, over_mtp1 = ratios
    return f"| {users:.0f} | {plain} | {mtp1} | **{dspark}** | {over_plain} | {over_mtp1} |"


def _ratio(each: Mapping[str, Any]) -> str:
    return f"{each['mid']:.2f} ({each['low']:.2f} to {each['high']:.2f})"


def main() -> None:
    with reading(RESULTS, "result of `dspark sweep`", "make it with `make figures`"):
        table = section(load_json(RESULTS))
    replace_text(README, rewritten(README.read_text(), table), "the README")


if __name__ == "__main__":
    try:
        main()
    except DSparkError as error:
        sys.exit(f"readme: {error}")
