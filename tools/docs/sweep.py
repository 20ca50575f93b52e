"""Write the results of the sweeps into README.md and docs/results-*.md, from their JSON.

`python tools/docs/sweep.py` rewrites the text between the marks of each section, so that page and
file cannot differ; `make figures` runs it after each sweep. All figures of a section are from one
run: one commit, machine and drafter.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dspark.common.atomic_write import replace_text
from sglang_dspark.common.files import load_json, reading
from sglang_dspark.errors import DSparkError

ROOT = Path(__file__).resolve().parents[2]
README, LOAD = ROOT / "README.md", ROOT / "docs" / "results-load.md"
SCHEDULER = ROOT / "docs" / "scheduler.md"
TARGETS, STABILITY = ROOT / "docs" / "results-targets.md", ROOT / "docs" / "results-stability.md"
RESULTS = ROOT / "results" / "sweep_cpu.json"
SAMPLED = ROOT / "results" / "sweep_sampled_cpu.json"
EQUAL = ROOT / "results" / "sweep_equal_training_cpu.json"
DEEPER = ROOT / "results" / "sweep_deeper_cpu.json"
BURST = ROOT / "results" / "sweep_burst_cpu.json"
HEADLESS = ROOT / "results" / "sweep_headless_cpu.json"
GOLDEN = ROOT / "results" / "sweep_golden_reduced_cpu.json"
ARMS = {
    "plain": "plain",
    "mtp1": "MTP-1",
    "mtp3": "MTP-3",
    "dspark-fixed-gamma": "fixed gamma",
    "dspark-static-threshold": "static threshold",
    "dspark": "DSpark",
}
EQUAL_ARM, EQUAL_STAGES = "dspark-equal-training", 3  # tools/equal-training/
HEADLESS_ARMS = {
    "mtp3": "MTP-3 as SGLang's EAGLE, all verified",
    "mtp-scheduled": "MTP, scheduled",
    "eagle3-scheduled": "Eagle3, scheduled",
    "dflash-scheduled": "DFlash, converted, scheduled",
}
SHOWN = (1, 4, 8, 16)  # users of the README's rows; the page has all
UNDER = ("plain", "mtp1", "dspark-fixed-gamma")
BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
EQUAL_MARKS = ("<!-- equal training: begin -->", "<!-- equal training: end -->")
SAMPLED_MARKS = ("<!-- sampled: begin -->", "<!-- sampled: end -->")
DEEPER_MARKS = ("<!-- deeper: begin -->", "<!-- deeper: end -->")
BURST_MARKS = ("<!-- burst: begin -->", "<!-- burst: end -->")
HEADLESS_MARKS = ("<!-- headless: begin -->", "<!-- headless: end -->")
GOLDEN_MARKS = ("<!-- golden: begin -->", "<!-- golden: end -->")
HEAD = (
    "| users at once | plain, tokens/s | MTP-1 | DSpark | over plain | over MTP-1 | verdict |",
    "|---|---|---|---|---|---|---|",
)


def section(document: Mapping[str, Any]) -> str:
    """Write the table and source of a `dspark sweep` result. Raises LookupError for other files."""
    metrics = document["metrics"]
    levels = metrics["matched_speed_ratio_vs_mtp1"]["levels"]
    users = ", ".join(f"{each['level']:.0f}" for each in levels)
    matched = ", ".join(f"{each['mid']:.2f}" for each in levels)
    unsure = ", ".join(f"{each['level']:.0f}" for each in levels if each["low"] <= 1)
    sure = "every interval is above one"
    sure = f"not {sure} (at {unsure} users)" if unsure else sure
    mix = metrics["mix"].replace(",", ", ")
    shown = [row for row in metrics["by_concurrency"] if row["concurrency"] in SHOWN]
    lines = [*HEAD, *(_row(metrics, row) for row in shown), ""]
    lines += wrapped(
        f"Speed per user over MTP-1 at the throughput of MTP-1 with {users} users: {matched}; "
        f"{sure}. {trained_alike()} Prompts: {mix}; "
        f"commit {metrics['sweep_commit'][:7]}; `make figures`. "
        "[All loads, intervals, machine](docs/results-load.md), "
        "[results/sweep_cpu.json](results/sweep_cpu.json)."
    )
    return "\n".join(lines)


def trained_alike(folder: Path = ROOT / "drafters") -> str:
    """Compare the trainings of both served drafters in one sentence, from `training.json`.

    They are alike if steps, draft tokens and answers (of the stage with the most) are equal.
    """
    mtp1, dspark = (_training(folder / f"smollm2-135m-{kind}") for kind in ("mtp1", "dspark"))
    said = (
        "MTP-1's for {:,} steps, {:.1f} M draft tokens and {:,} answers, DSpark's for {:,} steps, "
        "{:.1f} M and {:,}".format(*mtp1, *dspark)
    )
    if mtp1 == dspark:
        return f"The drafters were trained alike: {said}."
    return (
        f"**The drafters were not trained alike**: {said}; [how much of these ratios is "
        "training](docs/results-load.md#with-about-equal-training)."
    )


def _training(drafter: Path, first: int | None = None) -> tuple[int, float, int]:
    """Return steps and millions of draft tokens of all stages, and the most answers of a stage.

    first: number of stages to count; all if None.
    """
    stages = load_json(drafter / "training.json")["stages"][:first]
    steps, tokens = 0, 0
    for config in (stage["config"] for stage in stages):
        schedule = config["schedule"]
        blocks = schedule["sequences_per_step"] * schedule["anchors_per_sequence"]
        steps += schedule["steps"]
        tokens += schedule["steps"] * blocks * config["drafter"]["gamma"]
    answers = max(int(each.get("sequences_at_end", each["sequences"])) for each in stages)
    return steps, tokens / 1e6, answers


def load_section(document: Mapping[str, Any]) -> str:
    """Write docs/results-load.md's section on the same file: all arms, goodput, open loop."""
    metrics = document["metrics"]
    over = " | ".join(f"over {ARMS[arm]}" for arm in UNDER)
    lines = [
        *_closed_loop(document, RESULTS),
        "",
        *_goodput(metrics),
        "",
        f"| arrivals a second | speed per user, {over.replace(' | ', ' | speed per user, ')} |",
        "|---|---|---|---|",
        *(_open_row(metrics, row["rate"]) for row in metrics["by_rate"]),
    ]
    return "\n".join(lines)


def sampled_section(document: Mapping[str, Any]) -> str:
    """Write the same page's section on sampled answers: closed loop and goodput."""
    return "\n".join([*_closed_loop(document, SAMPLED), "", *_goodput(document["metrics"])])


def equal_section(document: Mapping[str, Any]) -> str:
    """Write the same page's section on a drafter of an earlier stage next to the shipped one."""
    metrics, drafters = document["metrics"], ROOT / "drafters"
    trained = (
        "MTP-1's drafter has {:,} steps, {:.1f} M draft tokens and {:,} answers, that of *equal "
        "training* {:,} steps, {:.1f} M and {:,}, the shipped one {:,} steps, {:.1f} M and {:,}."
    ).format(
        *_training(drafters / "smollm2-135m-mtp1"),
        *_training(drafters / "smollm2-135m-dspark", EQUAL_STAGES),
        *_training(drafters / "smollm2-135m-dspark"),
    )
    lines = [
        *wrapped(trained),
        "",
        "| users | plain, tok/s | MTP-1 | equal training | shipped | equal training over plain "
        "| over MTP-1 | over shipped |",
        "|" + "---|" * 8,
    ]
    for row in metrics["by_concurrency"]:
        arms = ("plain", "mtp1", EQUAL_ARM, "dspark")
        speeds = [f"{row[arm]['tokens_per_s']['mid']:.1f}" for arm in arms]
        level = ("tokens_per_s", "closed", row["concurrency"])
        under = ("plain", "mtp1", "dspark")
        ratios = [ratio_text(_compared(metrics, arm, level, EQUAL_ARM)) for arm in under]
        lines.append(f"| {row['concurrency']:.0f} | {' | '.join([*speeds, *ratios])} |")
    levels = metrics["matched_speed_ratio_vs_mtp1"]["levels"]
    matched = ", ".join(f"{ratio_text(each)} at {each['level']:.0f}" for each in levels)
    lines += [
        "",
        *wrapped(f"Speed per user at MTP-1's throughput, over MTP-1, by users: {matched}."),
    ]
    return "\n".join([*lines, "", *_source(document, EQUAL)])


def deeper_section(document: Mapping[str, Any]) -> str:
    """Write docs/results-targets.md's section on the deeper target: closed loop only."""
    return "\n".join(_closed_loop(document, DEEPER))


def golden_section(document: Mapping[str, Any]) -> str:
    """Write its section on a sweep at a real shape; each table is labelled as simulated acceptance.

    Raises LookupError if the acceptance was measured.
    """
    if not (label := document["metrics"]["label"]):
        raise LookupError("acceptance was measured")
    return "\n".join(_closed_loop(document, GOLDEN, f", {label}"))


def headless_section(document: Mapping[str, Any]) -> str:
    """Write docs/scheduler.md's section: tokens/s of drafters without a head, and over plain."""
    metrics = document["metrics"]
    rows = metrics["by_concurrency"]
    loads = " | ".join(f"{row['concurrency']:.0f}" for row in rows)
    head = [f"| users, tokens/s and over plain | {loads} |", "|---" * (1 + len(rows)) + "|"]
    lines = [*_source(document, HEADLESS), "", *head]
    plain = " | ".join(f"{row['plain']['tokens_per_s']['mid']:.1f}" for row in rows)
    lines.append(f"| plain | {plain} |")
    for arm in (name for name in HEADLESS_ARMS if name in rows[0]):
        cells = []
        for row in rows:
            level = ("tokens_per_s", "closed", row["concurrency"])
            ratio = ratio_text(_compared(metrics, "plain", level, over=arm))
            cells.append(f"{row[arm]['tokens_per_s']['mid']:.1f}: {ratio}")
        lines.append(f"| {HEADLESS_ARMS[arm]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def burst_section(document: Mapping[str, Any]) -> str:
    """Write docs/results-stability.md's section: latencies at p99 before, in and after a burst."""
    (burst,) = document["metrics"]["bursts"]
    return "\n".join(
        [
            *_source(document, BURST),
            "",
            f"A load of {burst['level']:g} requests/s on average:",
            "",
            "| arm | requests due | answered | TTFT p50, s | TTFT p99, s | TPOT p99, ms "
            "| whole answer p99, s |",
            "|---|---|---|---|---|---|---|",
            *(_phase_row(arm["arm"], phase) for arm in burst["arms"] for phase in arm["phases"]),
        ]
    )


def _phase_row(arm: str, phase: Mapping[str, Any]) -> str:
    times = (phase["ttft_p50"], phase["ttft_p99"], 1e3 * phase["tpot_p99"], phase["e2e_p99"])
    figures = [f"{value:.{0 if value >= 100 else 2}f}" for value in times]
    when = {"before": "before it", "burst": "in it", "after": "after it"}[phase["name"]]
    answered = f"{phase['ok']} of {phase['requests']}"
    return f"| {ARMS[arm]} | {when} | {answered} | {' | '.join(figures)} |"


def _source(document: Mapping[str, Any], source: Path) -> list[str]:
    metrics = document["metrics"]
    return wrapped(
        f"`{document['command']}`, commit {metrics['sweep_commit'][:7]}, {document['date'][:10]}, "
        f"{document['device']}; {metrics['trials']} trials; "
        f"[results/{source.name}](../results/{source.name})."
    )


def wrapped(text: str) -> list[str]:
    """Split a paragraph into lines of a page."""
    return textwrap.wrap(text, 100, break_long_words=False, break_on_hyphens=False)


def _closed_loop(document: Mapping[str, Any], source: Path, note: str = "") -> list[str]:
    metrics = document["metrics"]
    arms = [arm for arm in ARMS if arm in metrics["by_concurrency"][0]]
    speeds = " | ".join(f"{ARMS[arm]}, tok/s" for arm in arms)
    over = " | ".join(f"over {ARMS[arm]}" for arm in arms[:-1])
    taus = " | ".join(f"tau, {ARMS[arm]}" for arm in arms[1:])
    return [
        *_source(document, source),
        "",
        *wrapped(f"**The verdict of the run: {metrics['verdict']}**"),
        "",
        f"| users{note} | {speeds} | {over} |",
        "|" + "---|" * 2 * len(arms),
        *(_arms_row(metrics, row, arms) for row in metrics["by_concurrency"]),
        "",
        f"| users{note} | {taus} | drafts verified a request |",
        "|" + "---|" * (1 + len(arms)),
        *(_tau_row(row, arms) for row in metrics["by_concurrency"]),
        "",
        f"| load of MTP-1, users{note} | its throughput, tok/s "
        "| speed per user there, over MTP-1 |",
        "|---|---|---|",
        *(_matched_row(each) for each in metrics["matched_speed_ratio_vs_mtp1"]["levels"]),
    ]


def _goodput(metrics: Mapping[str, Any]) -> list[str]:
    return [
        "| service level | arm | goodput, tok/s | users | what gives way first |",
        "|---|---|---|---|---|",
        *(row for level in metrics["slas"] for row in _goodput_rows(level)),
    ]


def rewritten(page: str, table: str, marks: tuple[str, str] = (BEGIN, END)) -> str:
    """Put `table` between a page's marks. Raises DSparkError unless each mark occurs once."""
    begin, end = marks
    if page.count(begin) != 1 or page.count(end) != 1:
        raise DSparkError(f"the page must have {begin} and {end} once each")
    before, rest = page.split(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def _arms_row(metrics: Mapping[str, Any], row: Mapping[str, Any], arms: Sequence[str]) -> str:
    speeds = [f"{row[arm]['tokens_per_s']['mid']:.1f}" for arm in arms]
    level = ("tokens_per_s", "closed", row["concurrency"])
    ratios = [ratio_text(_compared(metrics, arm, level)) for arm in arms[:-1]]
    return f"| {row['concurrency']:.0f} | {' | '.join([*speeds, *ratios])} |"


def _matched_row(level: Mapping[str, Any]) -> str:
    return f"| {level['level']:.0f} | {level['tokens_per_s']:.0f} | {ratio_text(level)} |"


def _tau_row(row: Mapping[str, Any], arms: Sequence[str]) -> str:
    taus = [f"{row[arm]['tau']:.2f}" for arm in arms[1:]]
    verified = f"{row['dspark']['verify_length']:.2f}"
    return f"| {row['concurrency']:.0f} | {' | '.join([*taus, verified])} |"


def _goodput_rows(level: Mapping[str, Any]) -> list[str]:
    limits = [f"median user {level['speed_p50']:g} tok/s"]
    if level["speed_p10"] is not None:
        limits.append(f"slowest tenth {level['speed_p10']:g}")
    if level["ttft_p95"] is not None:
        limits.append(f"TTFT p95 {level['ttft_p95']:g} s")
    rows = []
    for place, each in enumerate(level["arms"]):
        name = ", ".join(limits) if place == 0 else ""
        known = each["tokens_per_s"] is not None and each["load"] is not None
        figures = f"{each['tokens_per_s']:.1f} | {each['load']:.1f}" if known else "- | -"
        limit = each["why"].removesuffix(" is what limits it")
        rows.append(f"| {name} | {ARMS[each['arm']]} | {figures} | {limit} |")
    return rows


def _open_row(metrics: Mapping[str, Any], rate: float) -> str:
    level = ("speed_p50", "open", rate)
    ratios = (ratio_text(_compared(metrics, arm, level)) for arm in UNDER)
    return f"| {rate:.2f} | {' | '.join(ratios)} |"


def _compared(
    metrics: Mapping[str, Any], under: str, level: tuple[str, str, float], over: str = "dspark"
) -> Mapping[str, Any]:
    """Find the paired ratio of one arm over another at (what, loop, level)."""
    found: Mapping[str, Any] = next(
        each
        for each in metrics["ratios"]
        if (each["over"], each["under"]) == (over, under)
        and (each["what"], each["loop"], each["level"]) == level
    )
    return found


def _row(metrics: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    users = row["concurrency"]
    speeds = [f"{row[arm]['tokens_per_s']['mid']:.0f}" for arm in ("plain", "mtp1", "dspark")]
    level = ("tokens_per_s", "closed", users)
    ratios = [_compared(metrics, arm, level) for arm in ("plain", "mtp1")]
    plain, mtp1, dspark = speeds
    cells = [f"{users:.0f}", plain, mtp1, f"**{dspark}**"]
    cells += [f"{each['mid']:.2f}" for each in ratios] + [_verdict(*ratios)]
    return f"| {' | '.join(cells)} |"


def _verdict(over_plain: Mapping[str, Any], over_mtp1: Mapping[str, Any]) -> str:
    """Put two paired ratios into words; "level" means that the interval contains 1."""
    plain, mtp1 = (
        "faster than" if each["low"] > 1 else "slower than" if each["high"] < 1 else "level with"
        for each in (over_plain, over_mtp1)
    )
    return f"{plain} both" if plain == mtp1 else f"{plain} plain, {mtp1} MTP-1"


def ratio_text(each: Mapping[str, Any]) -> str:
    """Format a ratio and its 95% interval as pages show them."""
    return f"{each['mid']:.2f} ({each['low']:.2f} to {each['high']:.2f})"


class Section(NamedTuple):
    """A part of a page: its marks, and the function that writes it from a result file."""

    page: Path
    marks: tuple[str, str]
    source: Path
    write: Callable[[Mapping[str, Any]], str]


SECTIONS = (
    Section(README, (BEGIN, END), RESULTS, section),
    Section(LOAD, (BEGIN, END), RESULTS, load_section),
    Section(LOAD, EQUAL_MARKS, EQUAL, equal_section),
    Section(LOAD, SAMPLED_MARKS, SAMPLED, sampled_section),
    Section(TARGETS, DEEPER_MARKS, DEEPER, deeper_section),
    Section(TARGETS, GOLDEN_MARKS, GOLDEN, golden_section),
    Section(SCHEDULER, HEADLESS_MARKS, HEADLESS, headless_section),
    Section(STABILITY, BURST_MARKS, BURST, burst_section),
)


def main() -> None:
    pages = {each.page: each.page.read_text() for each in SECTIONS}
    for each in SECTIONS:
        with reading(each.source, "result of `dspark sweep`", "its `command` in git makes it"):
            text = each.write(load_json(each.source))
        pages[each.page] = rewritten(pages[each.page], text, each.marks)
    for page, text in pages.items():
        replace_text(page, text, page.name)


if __name__ == "__main__":
    try:
        main()
    except DSparkError as error:
        sys.exit(f"sweep: {error}")
