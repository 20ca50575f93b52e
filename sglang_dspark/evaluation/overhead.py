"""What the sequential head costs (paper, Fig. 4b): its share of a round, measured in two ways.

A parallel drafter takes all gamma tokens from the base logits at once; DSpark goes through them
left to right, adding a transition bias and choosing a token at each position. That loop is timed
    engine   inside the reference engine, in rounds where every slot is busy; the loop is what
             `draft` takes beyond the base logits and the confidence, both of which it contains
    direct   on one fixed round of random states, alternating with the same round without the loop
in wall time and in CPU time of the calling thread, which other work on the machine disturbs less
(with several OpenMP threads it covers one of them only).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.drafter import DSparkDrafter
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.engine import ReferenceEngine
from sglang_dspark.evaluation.recording import Workload, describe, open_engine
from sglang_dspark.evaluation.target import TargetModel

WALL, CPU = "wall", "thread_cpu"
Clock = Callable[[], float]
_CLOCKS: dict[str, Clock] = {WALL: time.perf_counter, CPU: time.thread_time}
_WARM_UP = 3


def _synchronise(device: torch.device) -> None:
    """Wait for the device, so that a clock read means what it says."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class _Stopwatch:
    """Readings of both clocks around the calls of one function."""

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
) -> dict[str, Any]:
    """Times of the loop and of whole rounds inside `engine`, which drafts with `drafter`.

    Rounds count while all of min(batch, prompts) slots are busy; prefills precede them. Returns
    rounds, batch and, for each clock, seconds of the median round and loop and the share of sums.
    Raises DSparkError when fewer than two rounds were full.
    """
    batch = min(engine.settings.batch, len(prompts))
    device = drafter.embed_weight.device
    watches = {
        name: _Stopwatch(getattr(drafter, name), device)
        for name in ("forward_block", "draft", "base_logits", "confidence")
    }
    for name, watch in watches.items():
        object.__setattr__(drafter, name, watch)  # shadows the method on this object
    try:
        engine.run(prompts[:batch])
    finally:
        for name in watches:
            object.__delattr__(drafter, name)
    return _engine_result(watches, batch)


def _engine_result(watches: dict[str, _Stopwatch], batch: int) -> dict[str, Any]:
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
    loop = (spent["draft"] - spent["base_logits"] - spent["confidence"])[counted]
    result: dict[str, Any] = {"batch": batch, "rounds": len(counted)}
    for column, clock in enumerate(_CLOCKS):
        result[clock] = {
            "round_s": float(np.median(rounds[:, column])),
            "loop_s": float(np.median(loop[:, column])),
            "share": float(loop[:, column].sum() / rounds[:, column].sum()),
        }
    return result


@dataclass(frozen=True)
class _FixedRound:
    """One round on random states: batch rows behind `context` tokens each."""

    target: TargetModel
    drafter: DSparkDrafter
    batch: int
    context: int

    def states(self) -> dict[str, Any]:
        """Inputs that both variants use."""
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
        """Draft, verify and inject; the tokens verified are the same in both variants."""
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
) -> dict[str, Any]:
    """Seconds a round takes with the sequential loop and without, at one batch and context.

    The variants alternate, and the overhead is the median of the differences of neighbours, so
    that slow drifts of the machine cancel. share: overhead / round with the loop; share_low and
    share_high: its 95% percentile bootstrap interval over the pairs, of which it needs thirty.
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
    result: dict[str, Any] = {"batch": batch, "context": context, "pairs": repeats}
    generator = np.random.default_rng(0)
    drawn = generator.integers(0, repeats, size=(1000, repeats))
    for column, clock in enumerate(_CLOCKS):
        parallel, sequential = times[:, 0, column], times[:, 1, column]
        extra = sequential - parallel
        shares = np.median(extra[drawn], axis=1) / np.median(sequential[drawn], axis=1)
        low, high = np.percentile(shares, [2.5, 97.5])
        result[clock] = {
            "round_s": float(np.median(sequential)),
            "loop_s": float(np.median(extra)),
            "share": float(np.median(extra) / np.median(sequential)),
            "share_low": float(low),
            "share_high": float(high),
        }
    return result


def measure(work: Workload, path: Path, *, context: int, repeats: int) -> dict[str, Any]:
    """Both measurements of the DSpark drafter in `path`, at the workload's batch.

    Stop tokens are ignored, so that all requests stay in flight. Raises DSparkError for a drafter
    without a sequential head.
    """
    settings = replace(work.settings, stop_ids=frozenset())
    engine, drafter = open_engine(replace(work, settings=settings), path)
    if not isinstance(drafter, DSparkDrafter):
        raise DSparkError(f"{path} has no sequential head to time: name a DSpark drafter")
    batch = min(settings.batch, len(work.ids))
    facts = describe(path, engine.gamma)
    return {
        "gamma": engine.gamma,
        "head": facts.head,
        "drafter": asdict(facts),
        "engine": engine_share(engine, drafter, work.ids),
        "direct": direct_share(
            engine.target, drafter, batch=batch, context=context, repeats=repeats
        ),
    }
