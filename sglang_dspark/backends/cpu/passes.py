"""Passes of the real models on a CPU, for timing them at start-up: as a decode step runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from sglang_dspark.backends.cpu.commit import write_context
from sglang_dspark.backends.cpu.device import HostDevice
from sglang_dspark.backends.cpu.layout import layout_of, rows_in, window_of
from sglang_dspark.backends.cpu.target import VerifyRows, verify_forward
from sglang_dspark.serving.profile_passes import DummyBatches, ragged_forward


class Passes:
    """Runs passes of one worker on a CPU."""

    tiers: tuple[int, ...] = ()  # passes are not padded

    def __init__(self, worker: Any, device: HostDevice, clock: Callable[[], float]) -> None:
        self._worker, self._device = worker, device
        self._clock = clock
        self._dummies = DummyBatches(worker)
        self.gamma = int(worker.gamma)
        self.depths = tuple(range(1, self.gamma + 1))
        self.most_requests, self.longest = self._dummies.most_requests, self._dummies.longest

    def warm_up(self) -> None:
        """One pass of each kind, for what only a first pass does: compiling, first allocations."""
        context = min(8, self.longest)
        self.verify_seconds([0], context)
        self.verify_seconds([self.gamma] * min(2, self.most_requests), context)
        for depth in self.depths:
            self.draft_seconds(1, depth, context)

    def verify_seconds(self, drafts: Sequence[int], context: int) -> float:
        """Seconds of a pass that verifies drafts[r] of each request, injection included."""
        with self._dummies.batch(len(drafts), context) as batch:
            began = self._clock()
            self._verify(batch, drafts)
            return self._clock() - began

    def draft_seconds(self, requests: int, depth: int, context: int) -> float:
        """Seconds of drafting `depth` positions for every request."""
        with self._dummies.batch(requests, context) as batch:
            began = self._clock()
            self._device.draft(batch, batch.window, depth, None)
            return self._clock() - began

    def _verify(self, batch: Any, drafts: Sequence[int]) -> None:
        layout = layout_of(np.asarray(drafts, np.int64))
        rows = rows_in(layout, self.gamma + 1)
        tokens = torch.ones(len(drafts), self.gamma + 1, dtype=torch.int64)
        window = window_of(rows, tokens[:, :1], tokens[:, 1:], batch.window)
        slots, positions = window.verify_cache_loc, window.positions
        packed = VerifyRows(window.verify_ids, positions, slots, layout)
        output = verify_forward(
            self._worker, batch, packed,
            lambda: ragged_forward(self._worker, batch, layout, window),
        )  # fmt: skip
        kept = rows.starts
        write_context(self._worker, output.hidden_states[kept], slots[kept], positions[kept])
