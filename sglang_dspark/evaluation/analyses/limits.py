"""Find what limits drafters, from greedy traces of one target and set of prompts.

Vocabulary: answer tokens outside a reduced draft vocabulary end every draft; `ceiling` is the tau
of a drafter that guesses all others.
Same anchors: a better drafter has other anchors than a worse one, and reaches deep positions at
harder ones, so shares by position of two traces are not comparable. Greedy answers are equal, so
many anchors are common to both; there both drafters have the same context.
First draft: later drafts count only if the first one is right. The arithmetic here (no
measurement) uses the measured chances along the block and changes the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.analyses import cells
from sglang_dspark.evaluation.analyses.analysis import Analysis
from sglang_dspark.evaluation.analyses.cells import Table
from sglang_dspark.evaluation.analyses.traced import ByDomain, TracedResult, origin
from sglang_dspark.evaluation.figure_parts import (
    COLOURS,
    GREY,
    MARKERS,
    bars,
    colour_of,
    new_figure,
    whole_numbers,
)
from sglang_dspark.evaluation.records import Generation, Step
from sglang_dspark.evaluation.resampling import MACRO, Floats, Resampler, estimate
from sglang_dspark.evaluation.traces import Trace, require_comparable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FIRST = (0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85)  # chances of the first draft to try
_GAINS = (1.16, 1.27)  # of tau: the paper's over DFlash and over Eagle3


@dataclass(frozen=True)
class Cumulative:
    """Chances that drafts 1..k are accepted, [gamma]: by each drafter, and by both at once."""

    ours: tuple[ByDomain, ...]
    theirs: tuple[ByDomain, ...]
    both: tuple[ByDomain, ...]


@dataclass(frozen=True)
class SameAnchors:
    """Two drafters at their common anchors. first_draft_equal: share of equal first drafts."""

    anchors: int
    first_draft_equal: ByDomain
    cumulative: Cumulative


@dataclass(frozen=True)
class Taus:
    """tau by arithmetic; their_later: our first draft followed by their later ones."""

    ours: float
    theirs: float
    their_later: float


@dataclass(frozen=True)
class Ratio:
    """Ratio of two taus by each rule of `first_draft`, when our first chance is `first`."""

    first: float
    scaled: float
    alone: float


@dataclass(frozen=True)
class Needed:
    """First chances that a gain requires by each rule; None: not even 1 is enough."""

    scaled: float | None
    alone: float | None


@dataclass(frozen=True)
class FirstDraft:
    """Effect of the first draft's chance on a ratio of taus; needed: by gain."""

    tau: Taus
    ratio: tuple[Ratio, ...]
    needed: Mapping[str, Needed]


@dataclass(frozen=True)
class LimitsResult(TracedResult):
    """vocabulary: its number of tokens. rejected_outside: by label; the last two by `A/B`."""

    analysis: ClassVar[str] = "limits"
    vocabulary: int
    outside: ByDomain
    ceiling: ByDomain
    rejected_outside: Mapping[str, ByDomain]
    same_anchors: Mapping[str, SameAnchors]
    first_draft: Mapping[str, FirstDraft]


def compute(traces: Mapping[str, Trace], vocabulary: frozenset[int]) -> LimitsResult:
    """Compute the limits of the traces; compare the first one with each other one.

    vocabulary: tokens that the drafters can draft. Raises DSparkError if the traces are sampled,
    or have other prompts, targets or answers.
    """
    labels = list(traces)
    require_comparable(list(traces.values()), labels)
    first = traces[labels[0]]
    if first.temperature != 0:
        raise DSparkError("limits are read off greedy traces: record them at temperature 0")
    resampler = Resampler(first.domains)
    outside, ceiling = _vocabulary(first, vocabulary, resampler)
    others = {f"{labels[0]}/{other}": traces[other] for other in labels[1:]}
    return LimitsResult(
        *origin(traces),
        vocabulary=len(vocabulary),
        outside=outside,
        ceiling=ceiling,
        rejected_outside={
            label: _rejected_outside(trace, vocabulary, resampler)
            for label, trace in traces.items()
        },
        same_anchors={k: _same_anchors(first, trace, resampler) for k, trace in others.items()},
        first_draft={k: first_draft(chances(first), chances(t)) for k, t in others.items()},
    )


def chances(trace: Trace) -> Floats:
    """Return the chance of each draft given those before it: [gamma], 0 if never reached."""
    taken = [step.accepted for each in trace.generations for step in each.steps]
    at_least = np.array([sum(n >= k for n in taken) for k in range(trace.gamma + 1)], np.float64)
    return at_least[1:] / np.maximum(at_least[:-1], 1)


def tau_of(conditional: Floats) -> float:
    """Return tau of a block with these chances of a draft given those before it, [gamma]."""
    return float(1 + np.cumprod(np.minimum(conditional, 1.0)).sum())


def first_draft(ours: Floats, theirs: Floats) -> FirstDraft:
    """Compute the effect of the first draft's chance on the ratio of two taus.

    ours, theirs: `chances`, [gamma] each. "scaled" multiplies both drafters' chances (at most 1) by
    the one factor that makes our first chance `first`; "alone" changes our first one only.
    """

    def scaled(first: float) -> float:
        factor = first / ours[0]
        return tau_of(ours * factor) / tau_of(theirs * factor)

    def alone(first: float) -> float:
        return tau_of(np.concatenate([[first], ours[1:]])) / tau_of(theirs)

    swapped = np.concatenate([ours[:1], theirs[1:]])
    start = float(ours[0])
    return FirstDraft(
        Taus(tau_of(ours), tau_of(theirs), tau_of(swapped)),
        tuple(Ratio(first, scaled(first), alone(first)) for first in _FIRST),
        {
            f"{gain:g}": Needed(_reaches(scaled, gain, start), _reaches(alone, gain, start))
            for gain in _GAINS
        },
    )


def _reaches(ratio: Callable[[float], float], gain: float, start: float) -> float | None:
    """Return the least chance from `start` on, in steps of 0.001, with ratio at least `gain`."""
    tried = np.arange(start, 1.0005, 0.001)
    return next((float(first) for first in tried if ratio(float(first)) >= gain), None)


def _vocabulary(
    trace: Trace, vocabulary: frozenset[int], resampler: Resampler
) -> tuple[ByDomain, ByDomain]:
    """Return, by domain, share of answer tokens outside and tau of guessing all the others."""
    outside, tokens, yielded, steps = (np.zeros(len(trace.prompts)) for _ in range(4))
    for i, generation in enumerate(trace.generations):
        answer = generation.tokens[1:]  # the first one is the prefill's
        outside[i] = sum(token not in vocabulary for token in answer)
        tokens[i] = len(answer)
        yielded[i], steps[i] = perfect_walk(answer, vocabulary, trace.gamma)
    return _estimates(resampler, outside, tokens), _estimates(resampler, yielded, steps)


def perfect_walk(
    answer: tuple[int, ...], vocabulary: frozenset[int], gamma: int
) -> tuple[int, int]:
    """Count tokens yielded and steps of a drafter that guesses every token of the vocabulary."""
    at = steps = 0
    while at < len(answer):
        window = answer[at : at + gamma]
        wrong = (k for k, token in enumerate(window) if token not in vocabulary)
        at += next(wrong, gamma) + 1
        steps += 1
    return min(at, len(answer)), steps


def _rejected_outside(trace: Trace, vocabulary: frozenset[int], resampler: Resampler) -> ByDomain:
    """Return the share of rejections at which the target's token was outside the vocabulary."""
    outside, rejected = np.zeros(len(trace.prompts)), np.zeros(len(trace.prompts))
    for i, generation in enumerate(trace.generations):
        for step in generation.steps:
            token = _token_behind(generation, step)
            if step.accepted < step.verify_len and token is not None:
                rejected[i] += 1
                outside[i] += token not in vocabulary
    return _estimates(resampler, outside, rejected)


def _token_behind(generation: Generation, step: Step) -> int | None:
    """Return the target's token behind the accepted drafts, None past the end of the answer."""
    place = step.position + 1 + step.accepted - generation.prompt_tokens
    return generation.tokens[place] if place < len(generation.tokens) else None


def _same_anchors(ours: Trace, theirs: Trace, resampler: Resampler) -> SameAnchors:
    """Return the chances that drafts 1..k are accepted at common anchors, by each and by both."""
    gamma, prompts = min(ours.gamma, theirs.gamma), len(ours.prompts)
    hits = [np.zeros((gamma, prompts)) for _ in range(3)]  # ours, theirs, both
    anchors, equal = np.zeros(prompts), np.zeros(prompts)
    pairs = zip(ours.generations, theirs.generations, strict=True)
    for i, (one, other) in enumerate(pairs):
        if one.tokens != other.tokens:
            continue  # a tie of the target's logits broken by rounding: later anchors differ
        known = {step.position: step for step in other.steps}
        for step in (step for step in one.steps if step.position in known):
            a, b = step.accepted, known[step.position].accepted
            anchors[i] += 1
            equal[i] += step.drafted[0] == known[step.position].drafted[0]
            for found, reach in zip(hits, (a, b, min(a, b)), strict=True):
                found[: min(reach, gamma), i] += 1
    if not anchors.any():
        raise DSparkError("the traces have no anchor in common: are they of the same target?")
    cumulative = (tuple(_estimates(resampler, row, anchors) for row in rows) for rows in hits)
    return SameAnchors(
        int(anchors.sum()), _estimates(resampler, equal, anchors), Cumulative(*cumulative)
    )


def _estimates(resampler: Resampler, numerator: Floats, denominator: Floats) -> ByDomain:
    """Return the ratio by domain and in macro average, with intervals."""
    drawn = resampler.ratios(numerator, denominator)
    return {name: estimate(values) for name, values in drawn.items()}


def draw(result: LimitsResult) -> Figure:
    """Draw the shares outside the vocabulary, and a panel for each pair at common anchors."""
    pairs = result.same_anchors
    figure = new_figure(4.2 + 2.6 * len(pairs), 3.6)
    grid = figure.subplots(1, 1 + len(pairs), width_ratios=[1.5, *[1] * len(pairs)], squeeze=False)
    _draw_outside(grid[0][0], result)
    for axes, (pair, found) in zip(grid[0][1:], pairs.items(), strict=True):
        _draw_pair(axes, pair, found)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8, ncols=len(labels))
    return figure


def _draw_outside(axes: Axes, result: LimitsResult) -> None:
    """Draw shares by domain: of the answer's tokens, and of each drafter's rejections."""
    shares = {"answer tokens": result.outside}
    shares |= {f"rejections, {k}": v for k, v in result.rejected_outside.items()}
    groups = list(result.outside)
    width = 0.84 / len(shares)
    for i, (label, found) in enumerate(shares.items()):
        points = [found[group] for group in groups]
        place = np.arange(len(groups)) + (i - (len(shares) - 1) / 2) * width
        axes.bar(
            place, [100 * p.value for p in points], width * 0.94, yerr=100 * bars(points),
            color=GREY if i == 0 else colour_of(i - 1), label=label,
            error_kw={"elinewidth": 0.8, "ecolor": "#333333"},
        )  # fmt: skip
    axes.set_xticks(np.arange(len(groups)), groups)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("%")
    axes.set_title("outside the draft vocabulary,\nof answer tokens and of rejections", fontsize=9)


def _draw_pair(axes: Axes, pair: str, found: SameAnchors) -> None:
    """Draw the cumulative acceptance of two drafters at common anchors, in macro average."""
    chances = found.cumulative
    ours, theirs = pair.split("/", 1)
    sides = [(ours, chances.ours, "-"), (theirs, chances.theirs, "-")]
    sides.append(("both at once", chances.both, "--"))
    for i, (title, rows, style) in enumerate(sides):
        points = [each[MACRO] for each in rows]
        axes.errorbar(
            np.arange(1, len(points) + 1), [p.value for p in points], bars(points),
            fmt=MARKERS[i] + style, color=COLOURS[i], label=title, ms=4, capsize=2,
        )  # fmt: skip
    axes.set_ylim(0, 1)
    whole_numbers(axes)
    axes.set_xlabel("draft position k")
    axes.set_title(f"drafts 1..k accepted at\n{found.anchors} common anchors", fontsize=9)
    axes.legend(fontsize=7)


def page_tables(result: LimitsResult) -> list[Table]:
    """Tabulate the vocabulary; with several drafters also the common anchors and the arithmetic."""
    groups = list(result.outside)
    rows = [
        ["answer tokens outside", *(cells.share_interval(result.outside[g]) for g in groups)],
        ["tau of a perfect drafter", *(cells.interval(result.ceiling[g]) for g in groups)],
    ]
    for label, found in result.rejected_outside.items():
        shares = (cells.share_interval(found[group]) for group in groups)
        rows.append([f"rejections outside, {label}", *shares])
    tables = [Table(["vocabulary", *groups], rows)]
    if result.same_anchors:
        tables.append(_pairs_table(result.same_anchors))
        tables.append(_first_draft_table(result.first_draft))
    return tables


def _pairs_table(pairs: Mapping[str, SameAnchors]) -> Table:
    """Tabulate the chances that each of two drafters has drafts 1..k accepted at common anchors."""
    rows = []
    for pair, found in pairs.items():
        sides = (found.cumulative.ours, found.cumulative.theirs)
        for side, name in zip(sides, pair.split("/", 1), strict=True):
            shares = [cells.share_interval(each[MACRO]) for each in side]
            rows.append([pair, str(found.anchors), name, *shares])
    width = max(map(len, rows)) - 3
    head = ["pair", "common anchors", "drafts 1..k accepted by"]
    return Table(
        [*head, *(f"{k + 1}" for k in range(width))],
        [[*row, *[""] * (width + 3 - len(row))] for row in rows],
    )


def _first_draft_table(pairs: Mapping[str, FirstDraft]) -> Table:
    """Tabulate ratio of taus - 1 by the first draft's chance: both scaled, or ours changed."""
    rows = []
    for pair, found in pairs.items():
        scaled = [row.scaled for row in found.ratio], [n.scaled for n in found.needed.values()]
        alone = [row.alone for row in found.ratio], [n.alone for n in found.needed.values()]
        for name, (ratios, needed) in (("both scaled", scaled), ("ours alone", alone)):
            gains = (f"{100 * (ratio - 1):+.0f}%" for ratio in ratios)
            rows.append([pair, name, *gains, *map(cells.number, needed)])
    one = next(iter(pairs.values()))
    firsts = [f"k = 1 at {row.first:g}" for row in one.ratio]
    wanted = [f"needed for +{100 * (float(gain) - 1):.0f}%" for gain in one.needed]
    return Table(["ratio of tau - 1, arithmetic", "changed", *firsts, *wanted], rows)


ANALYSIS = Analysis(
    LimitsResult,
    "What the draft vocabulary ends, and drafts at the same anchors",
    draw,
    page_tables,
)
