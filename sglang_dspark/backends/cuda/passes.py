"""Time passes of the real models at the sizes of the captured graphs, at start-up.

Like backends/cpu/attach.py on a CPU: made-up requests in the first pool rows, a draft block or a
ragged verify pass with the injection of its rows, through the same runners
(sglang/srt/model_executor/runner/decode_cuda_graph_runner.py), which replay a graph where
one was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.backends.cuda import graph_epilogue
from sglang_dspark.backends.cuda.accept_warm_up import Shape, warm_up
from sglang_dspark.backends.cuda.compact_pass import (
    index_rows,
    padded_layout,
    ragged_window_of,
    strided,
)
from sglang_dspark.backends.cuda.device import GraphDevice
from sglang_dspark.kernels.admission import admit_triton
from sglang_dspark.kernels.platform import runs_on
from sglang_dspark.serving import upstream
from sglang_dspark.serving.profile_passes import (
    DummyBatches,
    draft_once,
    made_up_tokens,
    ragged_forward,
)
from sglang_dspark.step.verify import layout_of

_EAGER = 64  # requests, without graphs


@dataclass(frozen=True)
class _Asked:
    """A made-up pass. layout: upstream's. ids: [R, gamma + 1] int64, anchors and drafts."""

    layout: Any
    ids: Tensor
    accepts_in_graph: bool


class GraphPasses:
    """Passes that `schedule.profile` times on an accelerator."""

    def __init__(self, worker: Any, device: GraphDevice) -> None:
        self._worker, self._device = worker, device
        self._overlaps = not upstream.get_schedule().disable_overlap_schedule
        self._dummies = DummyBatches(worker)
        self._warm = False
        self.gamma = int(worker.gamma)
        self.most_requests, self.longest = self._dummies.most_requests, self._dummies.longest
        self.tiers = tuple(device.tiers)
        self.depths: tuple[int, ...] = (self.gamma,)  # other widths run outside the draft's graph

    def warm_up(self) -> None:
        """Run one pass of each kind, the operators of every size of batch that has graphs, and the
        accept rule with every sampling setting. Runs once: a kernel that compiles in a served step
        delays all its users."""
        if self._warm:
            return
        self._warm = True
        context = min(8, self.longest)
        self.verify_seconds([0], context)
        self.verify_seconds([self.gamma] * min(2, self.most_requests), context)
        self.draft_seconds(1, self.gamma, context)
        if runs_on(torch.device(self._worker.device)):
            most = min(self.most_requests, self._device.slots or _EAGER)
            for requests in sorted({min(1 << bits, most) for bits in range(most.bit_length() + 1)}):
                self._compile(requests, context)
            self._compile_accept(most, context)

    def _compile(self, requests: int, context: int) -> None:
        """Compile kernels that differ by powers of two of requests, on rows of the served types."""
        device = self._worker.device
        with self._dummies.batch(requests, context) as batch:
            proposal = self._draft(batch)
            self._verify(batch, self._asked([0] * requests))
        terms = torch.zeros(requests, 2 * self.gamma + 3, dtype=torch.float64, device=device)
        admit_triton(proposal.confidence_raw, terms, 0)

    def _compile_accept(self, most: int, context: int) -> None:
        """Compile the accept rules, whose kernels depend on the sampling settings of the batch."""
        with self._dummies.batch(1, context) as batch:
            block = draft_once(self._worker, self._worker._proposer, batch).draft_block
            asked = self._asked([0])
            packed = self._verify(batch, asked).next_token_logits
            logits = strided(packed, asked.layout, self.gamma + 1)  # as in steps that sample
            warm_up(self._device, Shape(self.gamma, logits[:1], block), most)

    def verify_seconds(self, drafts: Sequence[int], context: int) -> float:
        """Time a pass that verifies drafts[r] of each request, injection included."""
        requests, asked = len(drafts), self._asked(drafts)
        in_graph = self._device.in_graph(requests, sum(drafts))
        with self._dummies.batch(requests, context) as batch:
            return self._timed(lambda: self._verify(batch, asked), in_graph=in_graph)

    def draft_seconds(self, requests: int, depth: int, context: int) -> float:
        """Time the drafting of gamma positions for every request; the depth is ignored."""
        in_graph = self._device.in_graph(requests, 0)
        with self._dummies.batch(requests, context) as batch:
            return self._timed(lambda: self._draft(batch), in_graph=in_graph)

    def _draft(self, batch: Any) -> Any:
        """Return upstream's `DraftProposal`, with the confidence that a step admits by."""
        proposal = draft_once(self._worker, self._worker._proposer, batch)
        return self._device.with_confidence(proposal)

    def _timed(self, run: Callable[[], Any], *, in_graph: bool) -> float:
        """Measure seconds on the device. Overlap hides the launch of a graph, so with both the
        device is kept busy first and does not wait for the launch."""
        clock = self._device.clock
        if in_graph and self._overlaps:
            clock.lead()
        began = clock.mark()
        run()
        ended = clock.mark()
        torch.get_device_module(self._worker.device).synchronize()
        seconds = clock.seconds(began, ended)
        assert seconds is not None, "a synchronised device has passed all its events"
        return seconds

    def _asked(self, drafts: Sequence[int]) -> _Asked:
        """Upload a pass's inputs before its timing: the copy would wait for running work."""
        worker, requests, admitted = self._worker, len(drafts), sum(drafts)
        rows = np.cumsum([0, *(each + 1 for each in drafts)], dtype=np.int32)
        indptr = torch.from_numpy(rows).to(worker.device)
        layout = layout_of(indptr, self._device.pass_tokens(requests, admitted))
        ids = made_up_tokens(worker, requests, self.gamma + 1)
        return _Asked(layout, ids, self._device.accepts_in_graph(requests, admitted))

    def _verify(self, batch: Any, asked: _Asked) -> Any:
        """Return the target's `LogitsProcessorOutput`, with one row of hidden states a token."""
        worker, layout = self._worker, asked.layout
        rows = index_rows(worker, batch, layout, asked.ids, self._device.slots)
        epilogue = worker._verify_executor.verify_epilogue
        if asked.accepts_in_graph:
            epilogue.begin_step(layout.verify_lens, armed=False)
        padded = padded_layout(layout, rows, self.gamma + 1)
        outputs = ragged_forward(worker, batch, padded, ragged_window_of(rows))
        if not (asked.accepts_in_graph and graph_epilogue.commits(epilogue)):
            self._device.write_context(
                batch,
                rows,
                rows.slots,
                outputs.hidden_states,
                layout,
                torch.ones_like(layout.verify_lens),
            )
        return outputs
