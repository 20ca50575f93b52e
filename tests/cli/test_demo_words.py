"""Test the demo's messages: every case of the last line, the forecast, the sweep's table."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from sglang_dspark.cli._demo_words import (
    Crowd,
    Versus,
    forecast,
    from_sweep,
    identical,
    in_short,
    one_user,
)
from sglang_dspark.cli._sweep_view import results_table
from sglang_dspark.evaluation.prompts import EvalPrompt
from sglang_dspark.loadtest.bench.compare import Pair
from sglang_dspark.loadtest.client.metrics import Chunk, Completion
from sglang_dspark.loadtest.sweep.run_dir import Summary, read_summary
from tests.loadtest.made_run import make_run

SAME = "identical, 12 of 12"


@pytest.mark.parametrize(
    ("versus", "said"),
    [
        (Versus(1.62, 1.4, 1.9), "1.62x plain"),
        (Versus(1.02, 1.01, 1.03), "1.02x plain"),
        (Versus(1.30, 0.9, 1.8), "level with plain (1.30x, within noise)"),
        (Versus(0.97, 0.9, 1.1), "level with plain (0.97x, within noise)"),
        (Versus(0.80, 0.7, 0.9), "slower than plain (0.80x)"),
        # One trial: no interval.
        (Versus(1.19), "1.19x plain"),
        (Versus(1.08), "level with plain (1.08x, within noise)"),
        (Versus(0.92), "level with plain (0.92x, within noise)"),
        (Versus(0.85), "slower than plain (0.85x)"),
    ],
)
def test_faster_level_and_slower(versus: Versus, said: str) -> None:
    assert versus.said("plain") == said


@pytest.mark.parametrize(
    ("ratio", "verified", "said"),
    [
        (1.3, 0.1, "at 4 users 1.30x plain"),
        (1.3, 2.0, "at 4 users 1.30x plain"),
        (
            0.98,
            0.1,
            "at 4 users level with plain (0.98x, within noise), as the scheduler found drafting "
            "not worth it",
        ),
        (0.98, 2.0, "at 4 users level with plain (0.98x, within noise)"),
        (0.98, None, "at 4 users level with plain (0.98x, within noise)"),
        (0.8, 0.1, "at 4 users slower than plain (0.80x), though the scheduler drafted little"),
        (0.8, 2.0, "at 4 users slower than plain (0.80x)"),
    ],
)
def test_a_crowd(ratio: float, verified: float | None, said: str) -> None:
    assert Crowd(4, Versus(ratio), verified).said() == said


@pytest.mark.parametrize(
    ("one", "mtp", "crowd", "line"),
    [
        (
            Versus(1.6, 1.4, 1.8),
            Versus(1.19),
            Crowd(4, Versus(0.99), 0.2),
            "DSPARK here: 1.60x plain decoding for one user, 1.19x over MTP-1; at 4 users level "
            "with plain (0.99x, within noise), as the scheduler found drafting not worth it. "
            "Answers against plain decoding's: identical, 12 of 12.",
        ),
        (
            Versus(0.7),
            Versus(0.8),
            Crowd(2, Versus(1.2), 2.0),
            "DSPARK here: slower than plain decoding (0.70x) for one user, slower than MTP-1 "
            "(0.80x); at 2 users 1.20x plain. "
            "Answers against plain decoding's: identical, 12 of 12.",
        ),
        (
            Versus(1.05),
            None,
            None,
            "DSPARK here: level with plain decoding (1.05x, within noise) for one user. "
            "Answers against plain decoding's: identical, 12 of 12.",
        ),
    ],
)
def test_the_run_in_one_line(
    one: Versus, mtp: Versus | None, crowd: Crowd | None, line: str
) -> None:
    assert in_short(one, SAME, mtp, crowd) == line


def answered(*at: float, last: int = 1) -> Completion:
    """A token at each time; `last` ends it."""
    ids = [*range(len(at) - 1), last]
    return Completion(
        tuple(Chunk(t, "x", 1, (n,)) for t, n in zip(at, ids, strict=True)), 3, "length"
    )


def pair(dspark: Completion, plain: Completion) -> Pair:
    return Pair(EvalPrompt("chat-1", "chat", ("?",)), dspark, plain)


def test_one_users_interval_is_over_the_prompts() -> None:
    twice = pair(answered(0.1, 0.2, 0.3), answered(0.1, 0.3, 0.5))
    assert one_user([twice] * 4).word == "faster"
    mixed = one_user([twice, pair(twice.plain, twice.dspark)] * 2)
    assert mixed.ratio == pytest.approx(1)
    assert mixed.word == "level"
    assert mixed.low is not None
    assert mixed.low < 0.8
    alone = one_user([twice])
    assert (alone.ratio, alone.low) == (pytest.approx(2), None)
    empty = pair(answered(0.1), answered(0.1))  # one chunk: it has no speed
    assert one_user([twice, twice, twice, empty]).low == pytest.approx(2)


def test_identical_answers_are_counted() -> None:
    same, other = answered(0.1, 0.2), answered(0.1, 0.2, last=9)
    assert identical([pair(same, same)] * 3) == "identical, 3 of 3"
    assert identical([pair(same, same), pair(same, other)]) == "not all identical, 1 of 2"


def summary_of(folder: Path, trials: int) -> Summary:
    return read_summary(make_run(folder, arms=("plain", "mtp1", "dspark"), trials=trials))


def test_the_sweeps_part_of_the_line_is_the_sweeps(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, 1)
    mtp, crowd = from_sweep(summary, "dspark", "plain")
    ours = [r for r in summary.ratios if (r.over, r.what) == ("dspark", "tokens_per_s")]
    ratios = {(r.under, r.level): r for r in ours}
    assert mtp is not None
    assert crowd is not None
    assert mtp.ratio == ratios["mtp1", 1].mid
    assert (crowd.users, crowd.plain.ratio) == (8, ratios["plain", 8].mid)
    (row,) = [r for r in summary.levels if (r.arm, r.loop, r.level) == ("dspark", "closed", 8)]
    assert crowd.verified == row.verify_length
    assert from_sweep(summary, "mtp1", "nothing") == (None, None)


@pytest.mark.parametrize(("trials", "bounded"), [(1, False), (3, True)])
def test_intervals_are_shown_where_there_are_some(
    tmp_path: Path, trials: int, bounded: bool
) -> None:
    out = io.StringIO()
    Console(file=out, width=80).print(results_table(summary_of(tmp_path, trials)))
    shown = out.getvalue()
    assert ("95%" in shown) is bounded
    assert bool(re.search(r" \d+\.\d-\d+\.\d ", shown)) is bounded
    assert not re.search(r"- |-\d+\.\d-", shown.replace(" - ", ""))
    assert max(map(len, shown.splitlines())) <= 80
    assert "…" not in shown


def test_the_forecast_names_what_comes() -> None:
    whole = forecast(12, 64, 98, ("plain, mtp1, dspark with 1, 2, 4 users", 90.0))
    lines = whole.splitlines()
    assert lines[0].startswith("What comes, about ")
    assert [line.split()[0] for line in lines[1:]] == ["1.", "2.", "3.", "4.", "5."]
    assert "98 MB" in lines[1]
    assert "12 prompts" in lines[2]
    assert "plain, mtp1, dspark with 1, 2, 4 users" in lines[4]
    short = forecast(12, 64, 0, None)
    assert "MB" not in short
    assert "load test" not in short

    def minutes(said: str) -> int:
        return int(said.split("about ")[1].split()[0])

    assert minutes(whole) >= minutes(short) + 2
    assert minutes(forecast(120, 640, 0, None)) > minutes(short) + 30
