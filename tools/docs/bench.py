"""Write the tables of `dspark bench` into docs/scheduler.md and docs/results-targets.md, from JSON.

`python -m tools.docs.bench` rewrites the text between the marks of each table, so that pages and
files cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dspark.common.atomic_write import replace_text
from tools.docs.screen import results
from tools.docs.sweep import ratio_text, rewritten, wrapped

ROOT = Path(__file__).resolve().parents[2]
SCHEDULER, TARGETS = ROOT / "docs" / "scheduler.md", ROOT / "docs" / "results-targets.md"
Document = Mapping[str, Any]
# Rows of the page's table of formats, by the arms of `dspark bench llama`.
FORMATS = {
    ("this package", "float32"): ("plain-float32", "dspark-float32"),
    ("this package", "int8"): ("plain-int8", "dspark-int8"),
    ("llama.cpp", "F16"): ("llama.cpp f16",),
    ("llama.cpp", "Q8_0"): ("llama.cpp q8_0",),
    ("llama.cpp", "Q4_0"): ("llama.cpp q4_0",),
}


class Table(NamedTuple):
    """A part of a page. mark: its name in the page's comments. sources: files of results/."""

    page: Path
    mark: str
    sources: Sequence[str]
    write: Callable[..., Iterator[str]]

    def rewrite(self, page: str) -> str:
        """Return the page with this table rebuilt from its files."""
        text = "\n".join(self.write(*(result(name) for name in self.sources)))
        return rewritten(page, text, (f"<!-- {self.mark}: begin -->", f"<!-- {self.mark}: end -->"))


def result(name: str) -> Document:
    """Read a file of results/. Raises DSparkError if it cannot be read."""
    found: Document = results(ROOT / "results" / f"{name}.json")
    return found


def gammas(found: Document) -> Iterator[str]:
    """Tabulate plain decoding, the best fixed gamma and the scheduler by users."""
    yield (
        "| users | plain, tok/s | best fixed gamma | scheduled | over plain (95%) "
        "| over the best fixed (95%) |"
    )
    yield "|---|---|---|---|---|---|"
    for row in found["metrics"]["by_concurrency"]:
        best = f"{row['fixed'][row['best_fixed']]:.1f} ({row['best_fixed']})"
        speeds = f"{row['plain']:.1f} | {best} | {row['dspark']:.1f}"
        ratios = f"{ratio_text(row['over_plain'])} | {ratio_text(row['over_best_fixed'])}"
        yield f"| {row['concurrency']} | {speeds} | {ratios} |"
    yield from _source(found)


def more_gammas(many: Document, few: Document) -> Iterator[str]:
    """Tabulate the runs with more trials and fewer loads."""
    yield "| run | users | over plain (95%) | over the best fixed (95%) | trials |"
    yield "|---|---|---|---|---|"
    for name, found in (("many users", many), ("few users", few)):
        link = f"[{name}](../results/{found['name']}.json)"
        for row in found["metrics"]["by_concurrency"]:
            ratios = [row["over_plain"], row["over_best_fixed"]]
            cells = " | ".join(ratio_text(ratio) for ratio in ratios)
            yield f"| {link} | {row['concurrency']} | {cells} | {ratios[0]['trials']} |"
    for found in (many, few):
        yield from _source(found)


def serve(found: Document) -> Iterator[str]:
    """Tabulate speedups with answers of one length: while all users are busy, and a whole round."""
    yield (
        "| users | over plain while all users are busy "
        "| from the first request to the last answer |"
    )
    yield "|---|---|---|"
    for row in found["metrics"]["by_concurrency"]:
        cells = [
            _figures(row[name], row[f"{name}_ci95"]) for name in ("speedup", "whole_round_speedup")
        ]
        yield f"| {row['concurrency']} | {' | '.join(cells)} |"
    yield from _source(found)


def formats(found: Document) -> Iterator[str]:
    """Tabulate tokens/s of one user by server and weight format."""
    speeds = {arm["arm"]: f"{arm['tokens_per_s']:.0f}" for arm in found["metrics"]["arms"]}
    yield "| server | format | plain, tokens/s | DSpark, tokens/s |"
    yield "|---|---|---|---|"
    for (server, name), arms in FORMATS.items():
        cells = [*(speeds[arm] for arm in arms), ""][:2]
        yield f"| {server} | {name} | {' | '.join(cells).rstrip()} |"
    yield from _source(found)


def over_llama(eight: Document, embedded: Document, threads: Document) -> Iterator[str]:
    """Tabulate DSpark with int8 weights over llama.cpp, with prefill and without it."""
    yield (
        "| settings | Q8_0, whole answer | Q8_0, decode alone | Q4_0, whole | Q4_0, decode | file |"
    )
    yield "|---|---|---|---|---|---|"
    for name, found in (
        ("beside float32 arms", eight),
        ("int8 alone", embedded),
        ("int8 alone, two threads on two cores", threads),
    ):
        ratios = [each for each in found["metrics"]["ratios"] if each["arm"] == "dspark-int8"]
        cells = [
            _figures(ratio[part], ratio[f"{part}_ci95"])
            for peer in ("llama.cpp q8_0", "llama.cpp q4_0")
            for ratio in ratios
            if ratio["over"] == peer
            for part in ("whole", "decode")
        ]
        link = f"[results](../results/{found['name']}.json)"
        settings = f"{name}, {found['metrics']['repeats']} repeats, commit {found['commit'][:7]}"
        yield f"| {settings} | {' | '.join(cells)} | {link} |"
    for found in (embedded, threads):
        yield from _source(found)


def _source(found: Document) -> Iterator[str]:
    yield ""
    yield from wrapped(
        f"`{found['command']}`, commit {found['commit'][:7]}, {found['date'][:10]}, "
        f"{found['device']}; [results/{found['name']}.json](../results/{found['name']}.json)."
    )


def _figures(middle: float, interval: Sequence[float]) -> str:
    low, high = interval
    return ratio_text({"mid": middle, "low": low, "high": high})


TABLES = (
    Table(SCHEDULER, "gammas", ["adaptive_cpu"], gammas),
    Table(
        SCHEDULER, "more gammas", ["adaptive_many_users_cpu", "adaptive_few_users_cpu"], more_gammas
    ),
    Table(SCHEDULER, "serve", ["serve_cpu"], serve),
    Table(TARGETS, "formats", ["llama_cpu"], formats),
    Table(TARGETS, "llama", ["llama_cpu", "llama_int8_cpu", "llama_two_threads_cpu"], over_llama),
)


def main() -> None:
    """Rewrite the pages."""
    for table in TABLES:
        text = table.rewrite(table.page.read_text(encoding="utf-8"))
        replace_text(table.page, text, table.page.name)


if __name__ == "__main__":
    main()
