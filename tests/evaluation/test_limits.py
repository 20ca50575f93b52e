"""Vocabulary limits, common anchors, ROC and learning curves against counts by hand."""

from __future__ import annotations

from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.analyses import curves, limits, roc
from sglang_dspark.evaluation.analyses.limits import (
    Needed,
    chances,
    first_draft,
    perfect_walk,
)
from sglang_dspark.evaluation.analyses.roc import Curve, roc_curve
from sglang_dspark.evaluation.records import Generation, Step
from sglang_dspark.evaluation.traces import Trace
from tests.evaluation.trace_world import drawn, trace, training_run

ANSWER = (9, 1, 2, 3, 9, 4, 1, 1)  # behind a prompt of 2 tokens: positions 2..9; 9 is outside
INSIDE = frozenset({1, 2, 3, 4})


def _steps(*rows: tuple[int, int, int]) -> Trace:
    """A trace of one prompt; rows: position of the anchor, first draft, accepted drafts of 3."""
    steps = tuple(Step(at, (d, 0, 0), 3, n, n + 1, (0.5,) * 3) for at, d, n in rows)
    return trace([Generation(2, ANSWER, "length", steps)], ["math"], 3)


def test_perfect_walk_ends_blocks_at_unknown_tokens() -> None:
    """From 1 2 3 9 4 1 1: the block of 3 and the 9 as bonus, then the last three."""
    assert perfect_walk(ANSWER[1:], INSIDE, 3) == (7, 2)
    assert perfect_walk(ANSWER[1:], INSIDE - {2}, 3) == (7, 3)
    assert perfect_walk((9, 9), INSIDE, 3) == (2, 2)


def test_limits_by_hand() -> None:
    """Anchors 2, 6 and 8 against 2, 4, 6 and 8: three in common, of which one has another draft."""
    ours = _steps((2, 1, 3), (6, 4, 1), (8, 1, 0))
    theirs = _steps((2, 1, 1), (4, 3, 1), (6, 2, 0), (8, 1, 1))
    found = limits.compute({"a": ours, "b": theirs}, INSIDE)
    assert found.outside["math"].value == pytest.approx(1 / 7)
    assert found.ceiling["math"].value == pytest.approx(3.5)
    pair = found.same_anchors["a/b"]
    assert pair.anchors == 3
    assert pair.first_draft_equal["math"].value == pytest.approx(2 / 3)
    of = pair.cumulative
    shares = [[row["math"].value for row in rows] for rows in (of.ours, of.theirs, of.both)]
    assert shares[0] == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert shares[1] == pytest.approx([2 / 3, 0, 0])
    assert shares[2] == pytest.approx([1 / 3, 0, 0])
    # b's rejections: 2, 9 and 4 stood there instead; the answer ends where the last one was.
    assert found.rejected_outside["b"]["math"].value == pytest.approx(1 / 3)


def test_what_a_better_first_draft_would_be_worth() -> None:
    """a accepts 3, 1, 0 of its drafts, b 1, 1, 0, 1: chances 2/3, 1/2, 1 and 3/4, 0, 0."""
    ours = chances(_steps((2, 1, 3), (6, 4, 1), (8, 1, 0)))
    theirs = chances(_steps((2, 1, 1), (4, 3, 1), (6, 2, 0), (8, 1, 1)))
    assert ours == pytest.approx([2 / 3, 1 / 2, 1])
    assert theirs == pytest.approx([3 / 4, 0, 0])
    found = first_draft(ours, theirs)
    assert astuple(found.tau) == pytest.approx((7 / 3, 7 / 4, 5 / 3))
    row = found.ratio[1]  # 0.6, by a factor of 0.9: 1 + 0.6 (1 + 0.45 (1 + 0.9))
    assert row.first == 0.6
    assert row.scaled == pytest.approx((1 + 0.6 * (1 + 0.45 * 1.9)) / 1.675)
    assert row.alone == pytest.approx((1 + 0.6 * 2) / 1.75)
    assert found.needed["1.16"].alone == pytest.approx(2 / 3)  # it is there already
    equal = first_draft(theirs, theirs)
    assert equal.needed["1.27"] == Needed(scaled=None, alone=None)
    assert equal.needed["1.16"].alone is None  # 2 / 1.75 at most


def test_answers_that_differ_have_no_common_anchors() -> None:
    ours = _steps((2, 1, 3), (6, 4, 1), (8, 1, 0))
    moved = tuple(replace(each, tokens=ANSWER[::-1]) for each in ours.generations)
    with pytest.raises(DSparkError, match="no anchor in common"):
        limits.compute({"a": ours, "b": replace(ours, generations=moved)}, INSIDE)
    sampled = replace(ours, settings={**ours.settings, "temperature": 1.0})
    with pytest.raises(DSparkError, match="greedy"):
        limits.compute({"a": sampled}, INSIDE)


def test_area_below_the_curve_is_the_auc() -> None:
    part = roc.compute({"d": drawn(prompts=30, steps=30)}).groups["d"]["overall"]
    curve = part.curve
    assert 20 < len(curve.false_positive) <= 62
    area = np.trapezoid(curve.true_positive, curve.false_positive)
    assert area == pytest.approx(part.auc.pooled, abs=0.01)
    assert part.auc.pooled > 0.8


def test_equal_values_are_passed_at_once() -> None:
    curve = roc_curve(np.array([0.9, 0.5, 0.5, 0.1]), np.array([1.0, 1.0, 0.0, 0.0]))
    assert curve == Curve((0.0, 0.0, 0.5, 1.0), (0.0, 0.5, 1.0, 1.0))
    assert roc_curve(np.array([0.9]), np.array([1.0])).true_positive == ()


def test_curves_read_journals(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "loss": 2.0},
        {"step": 2, "loss": 1.5, "held_out_tau": 1.2, "held_out_loss": 1.6},
        {"step": 2, "loss": 1.5, "held_out_tau": 1.25, "held_out_loss": 1.6},  # resumed
    ]
    found = curves.compute([("e", training_run(tmp_path / "e", rows))])
    assert found.runs["e"].points == (curves.Point(2, 1.25, 1.6),)
    assert found.runs["e"].anchors_per_step == 6
    assert found.target == "tiny"


def test_bad_runs_are_one_line(tmp_path: Path) -> None:
    rows = [{"step": 2, "held_out_tau": 1.2}]
    one, other = training_run(tmp_path / "a", rows), training_run(tmp_path / "b", rows, target="cd")
    empty, broken = training_run(tmp_path / "c", []), training_run(tmp_path / "d", rows)
    (broken / "run.json").write_text("{")
    cases = [
        ([("x", one), ("x", one)], "labels must differ"),
        ([("x", one), ("y", other)], "of 2 targets"),
        ([("x", empty)], "nothing was measured"),
        ([("x", broken)], "is no training run"),
        ([("x", tmp_path / "none")], "cannot read the training run"),
    ]
    for runs, complaint in cases:
        with pytest.raises(DSparkError, match=complaint) as caught:
            curves.compute(runs)
        assert "\n" not in str(caught.value)
