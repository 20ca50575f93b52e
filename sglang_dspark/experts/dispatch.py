"""Choose the backend of a layer's experts and give the reason: by device, format, shape, tokens and
graph capture, and by measured times if available (times.py).

`Chooser` decides once for each power of two of tokens, for all layers of a model; a layer calls
`RoutedExperts`. A backend that fails is logged in one line and not used again, and the next one
computes the call; every change to a slower backend is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sglang_dspark.errors import DSparkError
from sglang_dspark.experts.backends import BACKENDS, Call, ExpertWeights, ExpertWorkload
from sglang_dspark.experts.times import (
    FAILURES,
    TOKENS,
    TimesTable,
    first_line,
    made_up_rows,
)

logger = logging.getLogger(__name__)

MARGIN = 0.95  # a later backend must need less than this share of the preferred one's time


@dataclass(frozen=True)
class Choice:
    """A backend of BACKENDS, the reason for it, and backend -> reason for those passed over."""

    backend: str
    reason: str
    passed_over: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.backend} ({self.reason})"


def choose(
    workload: ExpertWorkload,
    times: Mapping[str, float] | None = None,
    failed: Mapping[str, str] | None = None,
) -> Choice:
    """Choose the fastest backend by `times` (us), or without times the first of BACKENDS.

    Only backends that support the workload and are not in `failed` are candidates. Raises
    DSparkError, with the reason of each backend, if there is no candidate.
    """
    refused = dict(failed or {})
    for name, backend in BACKENDS.items():
        if name not in refused and (why := backend.why_not(workload)) is not None:
            refused[name] = why
    able = [name for name in BACKENDS if name not in refused]
    if not able:
        raise DSparkError(
            f"no way to compute {workload.format} experts on {workload.device}"
            f"{' in a graph' if workload.graph else ''}: "
            + "; ".join(f"{name}: {why}" for name, why in refused.items())
        )
    measured = {name: times[name] for name in able if name in times} if times else {}
    if not measured:
        return Choice(able[0], f"first that serves {workload.format} here", refused)
    preferred = next(iter(measured))
    best = min(measured, key=lambda name: measured[name] / (1 if name == preferred else MARGIN))
    slower = {n: f"measured {us:.1f} us" for n, us in measured.items() if n != best}
    return Choice(best, f"measured {measured[best]:.1f} us", refused | slower)


def announce(choice: Choice, missed: Mapping[str, str] | None = None) -> None:
    """Log the backend in use and those that failed, in one line.

    It is a warning if a backend failed, or if `torch`, the slow one, was chosen without a
    measurement."""
    failed = "".join(f"; {name} {why}" for name, why in (missed or {}).items())
    quickest = choice.backend != "torch" or choice.reason.startswith("measured")
    if quickest and not failed:
        logger.info("sglang-dspark: experts by %s", choice)
        return
    others = failed or "; not by " + "; ".join(f"{n}: {w}" for n, w in choice.passed_over.items())
    logger.warning("sglang-dspark: experts by %s%s", choice, others)


class Chooser:
    """Choices for all layers of a model. failed: backend -> its error, or its wrong result."""

    def __init__(self, workload: ExpertWorkload, times: TimesTable | None = None):
        self.workload, self.times = workload, times
        self.failed: dict[str, str] = times.unfit if times else {}
        self._names: dict[int, str] = {}

    def choice(self, tokens: int) -> Choice:
        """Choose a backend for a pass of this many tokens."""
        measured = self.times.near(tokens) if self.times else None
        return choose(replace(self.workload, tokens=tokens), measured, self.failed)

    def name(self, tokens: int) -> str:
        """Return the backend for a pass of this many tokens, chosen for the next power of two."""
        step = (tokens - 1).bit_length()
        if step not in self._names:
            choice = self.choice(1 << step)
            if choice.backend not in self._names.values():
                announce(choice, self.failed)
            self._names[step] = choice.backend
        return self._names[step]

    def drop(self, name: str, error: Exception) -> None:
        """Stop using this backend; the next choice is logged with the error."""
        self.failed[name] = f"failed: {first_line(error)}"
        self._names.clear()


class RoutedExperts:
    """The routed experts of one layer, computed by the chosen backend."""

    def __init__(self, weights: ExpertWeights, chooser: Chooser):
        self.weights, self.chooser = weights, chooser
        self._ready: dict[str, Call] = {}

    @torch.no_grad()
    def warm_up(self) -> None:
        """Run the backends of small, middling and large passes on made-up rows.

        Their prepared weights are then allocated before the KV pool is sized by the free memory,
        and no graph capture runs a backend that fails. Raises DSparkError if all fail.
        """
        for tokens in TOKENS:
            self(*made_up_rows(replace(self.chooser.workload, tokens=tokens)))

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute x [T, d], ids [T, k], weights [T, k] float32 -> [T, d]; T may be 0.

        Ids of -1 count as zero if the workload has experts on other ranks. Raises DSparkError if
        every backend that supports the workload has failed, and for experts out of range.
        """
        if not len(x):
            return torch.zeros_like(x)
        while True:
            name = self.chooser.name(len(x))
            try:
                if name not in self._ready:
                    self._ready[name] = BACKENDS[name].ready(self.weights, self.chooser.workload)
                return self._ready[name](x, ids, weights)
            except FAILURES as error:
                self.chooser.drop(name, error)
