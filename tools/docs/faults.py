"""Write docs/faults.md from results/faults_cpu.json, the record of `python -m tests.faults`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sglang_dspark.common.files import load_json, reading

RESULTS = Path(__file__).resolve().parents[2] / "results" / "faults_cpu.json"
INTRODUCTION = """# Faults

For operators. This page has each tested failure of a live server with its fallback, duration and
lost requests. Each line is a test (`tests/faults`) that injects the fault into a served process.
Surviving requests must answer as plain decoding does, token for token, before, during and after it.
No request may hang for 30 s. When the cache is flushed, SGLang's accounting, checked in every step,
must show an empty KV pool. The model is a tiny one with attention; its drafter is correct two times
of three.

*Named by* is what an operator sees: a `reason` of `sglang:dspark_fallbacks`
([meanings](metrics.md#fallbacks)), another counter of `/metrics`, a line of the log, or an answer's
status. *Seconds* are from the fault's end, or from the fault if it has none, to the next correct
answer, including a restart; for a refused start, until the process exits. *Lost* are running
requests that got an error.
"""
UNRECORDED = """
No run is recorded yet: `python -m tests.faults` runs all of them and writes the table.
"""
HEAD = """
| fault | result | named by | seconds | lost |
|---|---|---|---|---|
"""
TAIL = (
    "`{command}`, commit {commit}, {date}; {device}; "
    "[results/faults_cpu.json](../results/faults_cpu.json)."
)


def faults_page(path: Path = RESULTS) -> str:
    """Return docs/faults.md, also without a record. Raises DSparkError for an invalid record."""
    if not path.exists():
        return INTRODUCTION + UNRECORDED
    with reading(path, "record of faults", "`python -m tests.faults` writes it"):
        document = load_json(path)
        rows = "\n".join(_rows(document["metrics"]["faults"]))
        tail = TAIL.format(
            command=document["command"],
            commit=document["commit"][:7],
            date=document["date"][:10],
            device=document["device"],
        )
    source = textwrap.fill(tail, 100, break_long_words=False, break_on_hyphens=False)
    return f"{INTRODUCTION}{HEAD}{rows}\n\n{source}\n"


def _rows(faults: list[Mapping[str, Any]]) -> Iterator[str]:
    for each in faults:
        lost = f"{each['lost']} of {each['of']}" if each["of"] else "-"
        seconds = f"{each['recovered_s']:.1f}"
        cells = (each["fault"], each["happens"], each["named"], seconds, lost)
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
