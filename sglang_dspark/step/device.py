"""Define what differs between devices in a decode step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from sglang_dspark.step.clock import Clock
from sglang_dspark.step.engine import Step
from sglang_dspark.step.passes import Pass, Verified
from sglang_dspark.step.penalties import OutputCounts
from sglang_dspark.step.ranks import Engine
from sglang_dspark.step.rules import Rules
from sglang_dspark.step.seeds import Seeds


class Device(Protocol):
    """Draft, admit, lay out, verify, accept and commit a step on one kind of device.

    No method reads a value of the running step back to the host, unless the device is the host.
    """

    clock: Clock

    def plain_step(self, batch: Any, publish: Callable[..., None] | None) -> Any | None:
        """A step that drafts nothing, by a shorter way than the one through all stages.

        Upstream's `GenerationBatchResult`; None where there is no such way for this batch.
        """
        ...

    def rules(self, counts: OutputCounts, batch: Any) -> Rules:
        """Return the sampling settings of the batch that upstream ignores and this step applies."""
        ...

    def draft(self, batch: Any, window: Any, depth: int, seeds: Seeds | None) -> Any:
        """Upstream's `DraftProposal` of `depth` drafts a request, its tokens gamma wide.

        window: upstream's, of all places [R, gamma + 1]. seeds: of the requests that have one.
        """
        ...

    def accepts_in_graph(self, requests: int, admitted: int) -> bool:
        """Whether the verify pass runs in a graph that also holds the greedy accept rule."""
        ...

    def admit(
        self, engine: Engine, step: Step, logits: Tensor | None, greedy: Tensor | None
    ) -> Tensor:
        """indptr [R + 1] int32 on the device: R + `layout.admitted_drafts` rows to verify.

        logits: [R, d] confidence logits of this step's drafts; None where nothing was drafted or
        the drafter has no head. greedy: [R] bool on the host; None: every request.
        """
        ...

    def layout(self, step: Step, indptr: Tensor) -> Any:
        """Upstream's `RaggedVerifyLayout` of indptr [R + 1]."""
        ...

    def run(self, asked: Pass) -> Verified:
        """The target's pass over the windows."""
        ...

    def accept(self, asked: Pass, verified: Verified) -> Any:
        """Upstream's `AcceptOuts`: accepted drafts, bonus tokens, new lengths, emitted tokens."""
        ...

    def commit(self, asked: Pass, verified: Verified, accepted: Any) -> None:
        """Hidden states of accepted rows into the draft's context, as its keys and values."""
        ...
