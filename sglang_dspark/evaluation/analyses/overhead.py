"""Measure the sequential head's share of a round (paper, Fig. 4d), by block length and context.

A parallel drafter takes all gamma tokens from the base logits at once. DSpark processes them
left to right, adding a transition bias and choosing a token at each position. That loop is timed
    engine   inside the reference engine, in rounds where every slot is busy; the loop is the time
             of `draft` beyond the base logits and the confidence, both of which it contains
    direct   on fixed rounds of random states, one at each context, alternating with the same round
             without the loop
in wall time and in CPU time of the calling thread, which other work on the machine disturbs less
(with several OpenMP threads it covers one of them only).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.drafter import DSparkDrafter
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.analyses.analysis import Analysis, Result
from sglang_dspark.evaluation.analyses.cells import Table
from sglang_dspark.evaluation.engine import ReferenceEngine
from sglang_dspark.evaluation.figure_parts import colour_of, legend, marker_of, panels
from sglang_dspark.evaluation.recording import Workload, describe, open_engine
from sglang_dspark.evaluation.resampling import Floats
from sglang_dspark.evaluation.target import TargetModel
from sglang_dspark.evaluation.traces import DrafterFacts

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

WALL, CPU = "wall", "thread_cpu"
Clock = Callable[[], float]
_CLOCKS: dict[str, Clock] = {WALL: time.perf_counter, CPU: time.thread_time}
_WARM_UP = 3


@dataclass(frozen=True)
class Share:
    """Seconds of the median round and loop by one clock, and the loop's share of a round."""

    round_s: float
    loop_s: float
    share: float


@dataclass(frozen=True)
class BoundedShare(Share):
    """A share with its 95% percentile bootstrap interval over pairs of rounds."""

    share_low: float
    share_high: float


@dataclass(frozen=True)
class EngineShare:
    """Rounds of the engine in which all `batch` requests were in flight."""

    batch: int
    rounds: int
    wall: Share
    thread_cpu: Share


@dataclass(frozen=True)
class DirectShare:
    """Pairs of rounds, with the loop and without, at one batch and context."""

    batch: int
    context: int
    pairs: int
    wall: BoundedShare
    thread_cpu: BoundedShare


@dataclass(frozen=True)
class Timed:
    """Both measurements of one drafter; direct: at each context, in ascending order."""

    label: str
    gamma: int
    head: str
    drafter: DrafterFacts
    engine: EngineShare
    direct: tuple[DirectShare, ...]

    def shares(self) -> dict[str, Share]:
        """Return the shares by method and clock."""
        found: dict[str, Share] = {
            "engine, wall": self.engine.wall,
            "engine, thread cpu": self.engine.thread_cpu,
        }
        for each in self.direct:
            found[f"direct, context {each.context}, wall"] = each.wall
            found[f"direct, context {each.context}, thread cpu"] = each.thread_cpu
        return found


@dataclass(frozen=True)
class OverheadResult(Result):
    """The drafters in the given order. settings: temperature, batch, threads."""

    analysis: ClassVar[str] = "overhead"
    drafters: tuple[Timed, ...]


def _synchronise(device: torch.device) -> None:
    """Wait for the device, so that a clock reading includes its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class _Stopwatch:
    """Wrap a function and read both clocks around its calls."""

    function: Callable[..., Any]
    device: torch.device
    starts: list[tuple[float, float]] = field(default_factory=list)
    spent: list[tuple[float, float]] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    def __call__(self, first: Tensor, *args: Any, **kwargs: Any) -> Any:
        _synchronise(self.device)
        begun = tuple(clock() for clock in _CLOCKS.values())
        result = self.function(first, *args, **kwargs)
        _synchronise(self.device)
        ended = tuple(clock() for clock in _CLOCKS.values())
        self.starts.append((begun[0], begun[1]))
        self.spent.append((ended[0] - begun[0], ended[1] - begun[1]))
        self.rows.append(len(first))
        return result


def engine_share(
    engine: ReferenceEngine, drafter: DSparkDrafter, prompts: Sequence[Sequence[int]]
) -> EngineShare:
    """Time the loop and whole rounds inside `engine`, which drafts with `drafter`.

    Rounds count while all of min(batch, prompts) slots are busy; prefills precede them. The share
    is a ratio of sums over rounds.
    Raises DSparkError if fewer than two rounds were full.
    """
    batch = min(engine.settings.batch, len(prompts))
    device = drafter.embed_weight.device
    names = ["forward_block", "draft", "base_logits"]
    if drafter.confidence_head is not None:
        names.append("confidence")
    watches = {name: _Stopwatch(getattr(drafter, name), device) for name in names}
    for name, watch in watches.items():
        object.__setattr__(drafter, name, watch)  # shadows the method on this object
    try:
        engine.run(prompts[:batch])
    finally:
        for name in watches:
            object.__delattr__(drafter, name)
    return _engine_result(watches, batch)


def _engine_result(watches: dict[str, _Stopwatch], batch: int) -> EngineShare:
    begun = np.array(watches["forward_block"].starts)  # [rounds, clocks]
    full = np.array(watches["forward_block"].rows) == batch  # [rounds]
    counted = np.flatnonzero(full[:-1] & full[1:])[_WARM_UP:]
    if len(counted) < 2:
        raise DSparkError(
            f"only {len(counted)} rounds had all {batch} requests in flight: raise "
            "--max-new-tokens, or lower --batch"
        )
    rounds = (begun[1:] - begun[:-1])[counted]
    spent = {name: np.array(watch.spent) for name, watch in watches.items()}
    loop = (spent["draft"] - spent["base_logits"] - spent.get("confidence", 0.0))[counted]
    found = {
        clock: Share(
            round_s=float(np.median(rounds[:, column])),
            loop_s=float(np.median(loop[:, column])),
            share=float(loop[:, column].sum() / rounds[:, column].sum()),
        )
        for column, clock in enumerate(_CLOCKS)
    }
    return EngineShare(batch, len(counted), found[WALL], found[CPU])


@dataclass(frozen=True)
class _FixedRound:
    """One round on random states: batch rows behind `context` tokens each."""

    target: TargetModel
    drafter: DSparkDrafter
    batch: int
    context: int

    def states(self) -> dict[str, Any]:
        """Return the inputs that both variants use."""
        drafter, rows = self.drafter, self.batch
        generator = torch.Generator().manual_seed(0)
        gamma = drafter.config.gamma
        width = len(self.target.layer_ids) * drafter.config.hidden_size
        features = torch.randn(rows, self.context, width, generator=generator)
        places = torch.arange(self.context).expand(rows, -1)
        tokens = torch.randint(0, drafter.config.vocab_size, (rows, gamma + 1), generator=generator)
        return {
            "context": drafter.context_kv(features, places),
            "tokens": tokens,  # [R, gamma + 1], the anchor first
            "lens": torch.full((rows,), self.context),
            "cache": self.target.new_cache(rows, self.context + gamma + 1),
        }

    def __call__(self, states: dict[str, Any], sequential: bool) -> None:
        """Draft, verify and inject; both variants verify the same tokens."""
        drafter, tokens, lens = self.drafter, states["tokens"], states["lens"]
        anchor = tokens[:, 0]
        h = drafter.forward_block(anchor, lens, states["context"], lens)
        if sequential:
            drafter.draft(anchor, h)
        else:
            chosen = drafter.base_logits(h).argmax(-1)  # [R, gamma] all positions at once
            previous = torch.cat([anchor[:, None], chosen[:, :-1]], 1)
            drafter.confidence(h, drafter.markov_head.embed(previous))
        out = self.target.forward(tokens, lens, states["cache"])
        self.target.logits(out.hidden).argmax(-1)
        drafter.context_kv(out.features, lens[:, None] + torch.arange(tokens.shape[1]))


@torch.no_grad()
def direct_share(
    target: TargetModel, drafter: DSparkDrafter, *, batch: int, context: int, repeats: int
) -> DirectShare:
    """Time a round with the sequential loop and without, at one batch and context.

    The variants alternate, and the overhead is the median of the differences of neighbours, so
    that slow drifts of the machine cancel. share: overhead / round with the loop; its interval
    needs thirty pairs.
    """
    round_, device = _FixedRound(target, drafter, batch, context), drafter.embed_weight.device
    states = round_.states()
    times = np.zeros((repeats, 2, len(_CLOCKS)))
    for i in range(-_WARM_UP, repeats):
        for variant in (0, 1) if i % 2 else (1, 0):
            _synchronise(device)
            begun = [clock() for clock in _CLOCKS.values()]
            round_(states, sequential=variant == 1)
            _synchronise(device)
            ended = [clock() for clock in _CLOCKS.values()]
            if i >= 0:
                times[i, variant] = np.array(ended) - np.array(begun)
    wall, cpu = (_bounded(*times[:, :, column].T) for column in range(len(_CLOCKS)))
    return DirectShare(batch, context, repeats, wall, cpu)


def _bounded(parallel: Floats, sequential: Floats) -> BoundedShare:
    """Return the loop's share in rounds timed in pairs, [repeats] seconds each."""
    repeats = len(parallel)
    drawn = np.random.default_rng(0).integers(0, repeats, size=(1000, repeats))
    extra = sequential - parallel
    shares = np.median(extra[drawn], axis=1) / np.median(sequential[drawn], axis=1)
    low, high = np.percentile(shares, [2.5, 97.5])
    return BoundedShare(
        round_s=float(np.median(sequential)),
        loop_s=float(np.median(extra)),
        share=float(np.median(extra) / np.median(sequential)),
        share_low=float(low),
        share_high=float(high),
    )


def compute(
    work: Workload,
    drafters: Mapping[str, Path],
    *,
    contexts: Sequence[int],
    repeats: int,
    on_start: Callable[[str], None],
) -> OverheadResult:
    """Measure DSpark drafters in both ways, by label, at the workload's batch, greedy.

    contexts: tokens before the block in the direct timings. on_start: called with each label.
    Stop tokens are ignored, so that all requests stay in flight.
    Raises DSparkError for a drafter without a sequential head.
    """
    rows = []
    for label, path in drafters.items():
        on_start(label)
        rows.append(_timed(work, label, path, sorted(set(contexts)), repeats))
    settings = {"temperature": 0.0, "batch": work.settings.batch}
    settings["threads"] = torch.get_num_threads()
    return OverheadResult(work.target.name, settings, tuple(rows))


def _timed(work: Workload, label: str, path: Path, contexts: Sequence[int], repeats: int) -> Timed:
    settings = replace(work.settings, stop_ids=frozenset())
    engine, drafter = open_engine(replace(work, settings=settings), path)
    if not isinstance(drafter, DSparkDrafter):
        raise DSparkError(f"{path} has no sequential head to time: name a DSpark drafter")
    batch = min(settings.batch, len(work.ids))
    facts = describe(path, engine.gamma)
    return Timed(
        label=label,
        gamma=engine.gamma,
        head=facts.head,
        drafter=facts,
        engine=engine_share(engine, drafter, work.ids),
        direct=tuple(
            direct_share(engine.target, drafter, batch=batch, context=each, repeats=repeats)
            for each in contexts
        ),
    )


def draw(result: OverheadResult) -> Figure:
    """Draw the share by context, wall time, a line for each drafter."""
    figure, (axes,) = panels(1)
    for i, row in enumerate(result.drafters):
        contexts = [each.context for each in row.direct]
        share = 100 * np.array([each.wall.share for each in row.direct])
        ends = np.array([[each.wall.share_low, each.wall.share_high] for each in row.direct]).T
        axes.errorbar(
            contexts, share, np.abs(100 * ends - share), color=colour_of(i), marker=marker_of(i),
            lw=1, ms=4, capsize=2, label=row.label,
        )  # fmt: skip
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.set_xlabel("tokens of context")
    axes.set_ylabel(f"% of a round of {result.drafters[0].engine.batch}")
    legend(figure, axes)
    return figure


def page_tables(result: OverheadResult) -> list[Table]:
    """Tabulate one row for each drafter, method and clock."""
    rows = [
        [row.label, str(row.gamma), way, f"{1e3 * found.round_s:.2f}", f"{1e3 * found.loop_s:.3f}",
         f"{found.share:.2%}"]
        for row in result.drafters
        for way, found in row.shares().items()
    ]  # fmt: skip
    return [Table(["drafter", "gamma", "measured", "round ms", "loop ms", "share"], rows)]


def table(result: OverheadResult) -> list[RenderableType]:
    """Return one line for each drafter."""
    from rich.text import Text

    return [
        Text(
            f"{row.label}: {row.engine.wall.share:.2%} of a round in the engine (wall), "
            + ", ".join(f"{each.wall.share:.2%} at context {each.context}" for each in row.direct)
        )
        for row in result.drafters
    ]


def _summary(result: OverheadResult) -> dict[str, Any]:
    """Return the first drafter's share in the engine, by wall time."""
    return {"sequential_share": result.drafters[0].engine.wall.share}


ANALYSIS = Analysis(
    OverheadResult,
    "Share of a round spent in the sequential loop",
    draw,
    page_tables,
    table,
    _summary,
)
