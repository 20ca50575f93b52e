"""Write the results of screen and soak into docs/results-stability.md, from their JSON.

`python -m tools.docs.screen` rewrites the text between the page's marks, so that page and files
cannot differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_dspark.common.atomic_write import replace_text
from sglang_dspark.common.files import load_json, reading
from sglang_dspark.loadtest.bench.soak import GROWTH
from tools.docs.sweep import rewritten, wrapped

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "results-stability.md"
MARKS = ("<!-- screen: begin -->", "<!-- screen: end -->")
SCREEN, SOAK = ROOT / "results" / "screen_cpu.json", ROOT / "results" / "soak_cpu.json"


def section(screen: Mapping[str, Any], soak: Mapping[str, Any]) -> str:
    """Write both results as text and tables. Raises LookupError for other kinds of files."""
    return "\n".join([*_screen(screen), "", *_soak(soak)])


def _screen(document: Mapping[str, Any]) -> list[str]:
    lines = [
        "| screened | requests | tokens | tau | chunked | cached | retracted | cold starts | near "
        "ties | unexplained |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, run in document["metrics"]["runs"].items():
        ours = run["dspark"]
        tau = "-" if run["tau"] is None else f"{run['tau']:.2f}"
        edges = [ours[key] for key in ("chunked", "cached", "retracted", "cold")]
        cells = [name, run["requests"], run["tokens"], tau, *edges]
        cells += [run["near_ties"], f"**{run['unexplained']}**"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    runs = document["metrics"]["runs"].values()
    commits = ", ".join(sorted({run["commit"][:7] for run in runs}))
    ties = ", ".join(sorted({f"{run['near_tie_nats']:g}" for run in runs}))
    return [
        *lines,
        "",
        *wrapped(
            f"Near ties are below {ties} nats. Commit {commits}; {document['date'][:10]}; "
            f"{document['device']}; `dspark bench screen`; "
            "[results/screen_cpu.json](../results/screen_cpu.json)."
        ),
    ]


def _soak(document: Mapping[str, Any]) -> list[str]:
    metrics = document["metrics"]
    outcomes = ", ".join(f"{count} {name}" for name, count in metrics["outcomes"].items())
    books = metrics["books"]
    lines = [
        f"A soak of {metrics['minutes']:g} minutes ({metrics['served']}) at "
        f"{metrics['requests_per_s']:.2f} requests/s, {metrics['share_of_capacity']:.0%} of the "
        f"capacity measured",
        f"before ({metrics['capacity_tokens_per_s']:.0f} tokens/s): {outcomes}. Whole answers "
        f"brought {books['received']} tokens, the server made {books['generated']};",
        f"at rest {books['used_tokens']} tokens of its pool were in use.",
    ]
    if metrics.get("tau") is not None:
        lines.append(f"tau was {metrics['tau']:.2f}: the scheduler drafts where it pays.")
    if metrics["note"]:
        lines.append(f"At the same time: {metrics['note']}.")
    lines += ["", *(f"- not held: {fault}" for fault in metrics["faults"])]
    lines += [
        "",
        f"| process | MiB at the end | MiB a minute, second half (95%; limit {GROWTH}) | |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {each['process'].rsplit(' ', 1)[0]} | {each['last']:.0f} | {each['slope']:+.3f} "
        f"({each['low']:+.3f} to {each['high']:+.3f}) | {_growth(each)} |"
        for each in metrics["memory"]
        if each["slope"] is not None
    ]
    lines += [
        "",
        "| p99 | first third, s | last third, s | ratio (95%) | |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {each['latency']} | {each['first']:.3f} | {each['last']:.3f} | {each['ratio']:.2f} "
        f"({each['low']:.2f} to {each['high']:.2f}) | {_settled(each)} |"
        for each in metrics["drift"]
    ]
    return [
        *lines,
        "",
        *wrapped(
            f"Commit {document['commit'][:7]}; {document['date'][:10]}; {document['device']}; "
            f"`{document['command']}`; [results/soak_cpu.json](../results/soak_cpu.json)."
        ),
    ]


def _growth(memory: Mapping[str, Any]) -> str:
    if memory["grows"]:
        return "grows"
    return "held" if memory["high"] <= GROWTH else "not settled"


def _settled(drift: Mapping[str, Any]) -> str:
    if drift["held"]:
        return "held"
    return "slower" if drift["slower"] else "not settled"


def results(path: Path) -> Any:
    """Read a result file. Raises DSparkError if it cannot be read."""
    with reading(path, "result file", "run its command again"):
        return load_json(path)


def main() -> None:
    """Rewrite the page."""
    table = section(results(SCREEN), results(SOAK))
    replace_text(PAGE, rewritten(PAGE.read_text(encoding="utf-8"), table, MARKS), "page")


if __name__ == "__main__":
    main()
