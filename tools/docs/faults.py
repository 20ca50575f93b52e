"""Writes docs/faults.md from results/faults_cpu.json, the record of `python -m tests.faults`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sglang_dspark.common.files import load_json, reading

RESULTS = Path(__file__).resolve().parents[2] / "results" / "faults_cpu.json"
INTRODUCTION = """# Faults

What becomes of a live server when something goes wrong. Each line is a test (`tests/faults`): the
fault is brought about in a served process, or to it, and then requests that survive must answer as
plain decoding does, token for token, before, during and after; nothing may hang for 30 s; and once
the cache is emptied not one token of the KV pool may be held, by SGLang's own account, which is
checked in every step. The model is a tiny one that attends; its drafter is right two times of
three.

*Named by* is what an operator sees: a `reason` of `sglang:dspark_fallbacks`
([what each means](metrics.md#falls-back)), another counter of `/metrics`, a line of the log, or an
answer's status. *Seconds* are from the fault's end, or from the fault where it has none, to the
next right answer; a restart is in them; of a refused start, to its end. *Lost* are requests in work
that got an error.
"""
UNRECORDED = """
No run is recorded yet: `python -m tests.faults` runs all of them and writes the table.
"""
HEAD = """
| fault | what happens | named by | seconds | lost |
|---|---|---|---|---|
"""
TAIL = """
`{command}`, commit {commit}, {date}; {device};
[results/faults_cpu.json](../results/faults_cpu.json).
"""


def faults_page(path: Path = RESULTS) -> str:
    """docs/faults.md; before the first record it says so. Raises DSparkError on another file."""
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
    return f"{INTRODUCTION}{HEAD}{rows}\n{tail}"


def _rows(faults: list[Mapping[str, Any]]) -> Iterator[str]:
    for each in faults:
        lost = f"{each['lost']} of {each['of']}" if each["of"] else "-"
        seconds = f"{each['recovered_s']:.1f}"
        cells = (each["fault"], each["happens"], each["named"], seconds, lost)
        yield "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
