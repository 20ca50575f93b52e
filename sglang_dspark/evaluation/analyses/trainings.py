"""Compare recipes that were each trained several times, such as from three seeds.

Drafters of one label are trainings of one recipe, and the i-th of two labels are a pair. tau of a
recipe is the geometric mean over its trainings. Its interval over trainings is the t interval, over
prompts the bootstrap of that mean: neither contains the other's variance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.analyses import cells
from sglang_dspark.evaluation.analyses.analysis import Analysis, Result
from sglang_dspark.evaluation.analyses.cells import Table
from sglang_dspark.evaluation.analyses.traced import tau_draws
from sglang_dspark.evaluation.figure_parts import bars, colour_of, legend, marker_of, new_figure
from sglang_dspark.evaluation.resampling import Estimate, Floats, estimate
from sglang_dspark.evaluation.traces import DrafterFacts, Trace, require_comparable
from sglang_dspark.intervals import MIN_TRIALS, paired_ratio

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType


@dataclass(frozen=True)
class OverTrainings:
    """each: value of every training. by_trainings, by_prompts: their mean with both intervals."""

    each: tuple[float, ...]
    by_trainings: Estimate
    by_prompts: Estimate


@dataclass(frozen=True)
class TrainingsResult(Result):
    """Trainings and results by label.

    drafters: label -> its trainings. tau: label -> domain or macro; ratio: `FIRST/OTHER` -> the
    same, paired by training and by prompt.
    """

    analysis: ClassVar[str] = "trainings"
    prompts: Mapping[str, int]
    drafters: Mapping[str, tuple[DrafterFacts, ...]]
    tau: Mapping[str, Mapping[str, OverTrainings]]
    ratio: Mapping[str, Mapping[str, OverTrainings]]

    @property
    def groups(self) -> list[str]:
        """List the domains, then macro."""
        return list(next(iter(self.tau.values())))


def compute(trained: Sequence[tuple[str, Trace]]) -> TrainingsResult:
    """Compute tau of each recipe and the first one's ratio to the others.

    Raises DSparkError if the traces have other prompts, targets or sampling, if a drafter is
    named twice, or unless all recipes have the same number of trainings, at least three.
    """
    require_comparable([trace for _, trace in trained], [label for label, _ in trained])
    recipes: dict[str, list[Trace]] = {}
    for label, trace in trained:
        recipes.setdefault(label, []).append(trace)
    _require_trainings(recipes)
    # [draws + 1] by recipe, training and group, on the same draws for all.
    flat = tau_draws({f"{k}@{i}": t for k, ts in recipes.items() for i, t in enumerate(ts)})
    drawn = {k: [flat[f"{k}@{i}"] for i in range(len(ts))] for k, ts in recipes.items()}
    first, *others = drawn
    one = recipes[first][0]
    return TrainingsResult(
        one.target,
        dict(one.settings),
        prompts={name: one.domains.count(name) for name in dict.fromkeys(one.domains)},
        drafters={k: tuple(trace.drafter for trace in ts) for k, ts in recipes.items()},
        tau={label: _over(drawn[label]) for label in recipes},
        ratio={f"{first}/{label}": _over(drawn[first], drawn[label]) for label in others},
    )


def _require_trainings(recipes: Mapping[str, Sequence[Trace]]) -> None:
    counts = {label: len(traces) for label, traces in recipes.items()}
    if len(set(counts.values())) > 1 or min(counts.values()) < MIN_TRIALS:
        found = ", ".join(f"{label} {count}" for label, count in counts.items())
        raise DSparkError(
            f"recipes need the same number of trainings, {MIN_TRIALS} or more, found {found}: "
            "repeat --drafter LABEL=TRACE, one for each training"
        )
    hashes = [trace.drafter.sha256 for traces in recipes.values() for trace in traces]
    if len(set(hashes)) < len(hashes):
        raise DSparkError("two of the trainings are the same drafter: name each one once")


def _over(
    trainings: Sequence[Mapping[str, Floats]], under: Sequence[Mapping[str, Floats]] | None = None
) -> dict[str, OverTrainings]:
    """Compute tau by group, or its ratio to the tau of other trainings."""
    found = {}
    for group in trainings[0]:
        values = np.stack([each[group] for each in trainings])  # [trainings, draws + 1]
        if under is not None:
            values = values / np.stack([each[group] for each in under])
        each = values[:, 0].tolist()
        spread = paired_ratio(each, [1.0] * len(each))
        found[group] = OverTrainings(
            tuple(each),
            Estimate(spread.mid, spread.low, spread.high),
            estimate(np.exp(np.log(values).mean(0))),
        )
    return found


def draw(result: TrainingsResult) -> Figure:
    """Draw one dot per training and the mean with its interval over trainings, by domain."""
    figure = new_figure(7.2, 3.3)
    axes = figure.subplots()
    step = 0.8 / len(result.tau)
    for i, (label, groups) in enumerate(result.tau.items()):
        place = np.arange(len(groups)) + (i - (len(result.tau) - 1) / 2) * step
        means = [found.by_trainings for found in groups.values()]
        axes.errorbar(
            place, [m.value for m in means], bars(means), fmt=marker_of(i), color=colour_of(i),
            label=label, ms=6, capsize=3, elinewidth=1,
        )  # fmt: skip
        for x, found in zip(place, groups.values(), strict=True):
            beside = np.full(len(found.each), x + 0.22 * step)
            axes.plot(beside, found.each, ".", color=colour_of(i), ms=4, alpha=0.7)
    axes.set_xticks(np.arange(len(result.groups)), result.groups)
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("tau, mean of trainings")
    legend(figure, axes)
    return figure


def page_tables(result: TrainingsResult) -> list[Table]:
    """Tabulate tau of every recipe, then the ratios with both intervals."""
    groups = result.groups
    tables = [Table(["tau, 95% over trainings", *groups], list(_tau_rows(result)))]
    if result.ratio:
        tables.append(Table(["ratio of tau - 1", "95% over", *groups], list(_ratio_rows(result))))
    return tables


def table(result: TrainingsResult) -> list[RenderableType]:
    """Show the page's tables in the terminal."""
    from rich.table import Table as Shown

    shown = []
    for each in page_tables(result):
        one = Shown()
        for name in each.head:
            one.add_column(name)
        for row in each.rows:
            one.add_row(*row)
        shown.append(one)
    return [*shown]


def _tau_rows(result: TrainingsResult) -> Iterable[list[str]]:
    for label, groups in result.tau.items():
        yield [label, *(cells.interval(found.by_trainings) for found in groups.values())]


def _ratio_rows(result: TrainingsResult) -> Iterable[list[str]]:
    for pair, groups in result.ratio.items():
        yield [pair, "trainings", *(cells.gain(found.by_trainings) for found in groups.values())]
        yield [pair, "prompts", *(cells.gain(found.by_prompts) for found in groups.values())]


def _summary(result: TrainingsResult) -> dict[str, Any]:
    found = result.to_json()
    return {name: found[name] for name in ("tau", "ratio")}


ANALYSIS = Analysis(
    TrainingsResult,
    "Accepted tokens a step of recipes trained several times",
    draw,
    page_tables,
    table,
    _summary,
)
