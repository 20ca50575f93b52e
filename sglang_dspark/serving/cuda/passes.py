"""Passes of the real models at the sizes of the captured graphs, for timing them at start-up.

As `schedule/passes.py` does on a CPU: made-up requests in the first pool rows, a draft block or a
ragged verify pass with the injection of one token a request behind it, through the same runners
(sglang/srt/model_executor/runner/decode_cuda_graph_runner.py, 0.5.23), which replay a graph where
one was captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from sglang_dspark.kernels.commit_rows import Packed
from sglang_dspark.serving.cuda.device import GraphDevice
from sglang_dspark.serving.schedule.passes import Seats, draft_once, ragged_forward
from sglang_dspark.serving.step.layout import layout_of


class GraphPasses:
    """What `schedule.profile` times on an accelerator."""

    def __init__(self, worker: Any, device: GraphDevice) -> None:
        self._worker, self._device = worker, device
        self._seats = Seats(worker)
        self.gamma = int(worker.gamma)
        self.most_requests, self.longest = self._seats.most_requests, self._seats.longest
        self.tiers = tuple(device.tiers)
        self.depths: tuple[int, ...] = (self.gamma,)  # another width runs outside the draft's graph

    def warm_up(self) -> None:
        """One pass of each kind, for what only a first one does."""
        context = min(8, self.longest)
        self.verify_seconds([0], context)
        self.verify_seconds([self.gamma] * min(2, self.most_requests), context)
        self.draft_seconds(1, self.gamma, context)

    def verify_seconds(self, drafts: Sequence[int], context: int) -> float:
        """Seconds of a pass that verifies drafts[r] of each request, injection included."""
        with self._seats.taken(len(drafts), context) as batch:
            return self._timed(lambda: self._verify(batch, drafts))

    def draft_seconds(self, requests: int, depth: int, context: int) -> float:
        """Seconds of drafting gamma positions for every request, whatever the depth."""
        with self._seats.taken(requests, context) as batch:
            return self._timed(lambda: draft_once(self._worker, self._worker._proposer, batch))

    def _timed(self, run: Any) -> float:
        clock = self._device.clock
        began = clock.mark()
        run()
        ended = clock.mark()
        torch.get_device_module(self._worker.device).synchronize()
        seconds = clock.seconds(began, ended)
        assert seconds is not None, "a synchronised device has passed all its events"
        return seconds

    def _verify(self, batch: Any, drafts: Sequence[int]) -> None:
        from sglang.kernels.ops.speculative.dspark.dspark_verify_window import (
            BuildRaggedVerifyWindow,
        )

        worker, requests = self._worker, len(drafts)
        admitted = sum(drafts)
        rows = np.cumsum([0, *(each + 1 for each in drafts)], dtype=np.int32)
        indptr = torch.from_numpy(rows).to(worker.device)
        layout = layout_of(indptr, self._device.pass_tokens(requests, admitted))
        tokens = torch.ones(requests, self.gamma + 1, dtype=torch.int64, device=worker.device)
        window = BuildRaggedVerifyWindow.execute(
            batch=batch,
            layout=layout,
            draft_block_ids=tokens[:, :1],
            draft_tokens=tokens[:, 1:].contiguous(),
            bs=requests,
            device=worker.device,
            verify_num_draft_tokens=self.gamma + 1,
            model_runner=worker.model_runner,
        )
        if self._device.accepts_in_graph(requests, admitted):
            worker._verify_executor.verify_epilogue.begin_step(layout.verify_lens, armed=False)
        hidden = ragged_forward(worker, batch, layout, window).hidden_states
        first = layout.qo_indptr_device[:-1].long()  # a request's first row in the pass
        slots = window.verify_cache_loc[first].long()
        self._device.committer.write(worker, Packed(hidden[first], window.positions[first], slots))
