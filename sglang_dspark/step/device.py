"""Define the interface of a decode step to its device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from sglang_dspark.step.engine_protocol import Engine, Step
from sglang_dspark.step.seeds import Seeds
from sglang_dspark.step.verify import VerifyInput, VerifyOutput


class Device(Protocol):
    """Draft, admit, lay out, verify, accept and commit a step on one kind of device.

    Implementations: `HostDevice`, backends/cpu/device.py; `GraphDevice`, backends/cuda/device.py.
    No method reads a value of the running step back to the host, unless the device is the host.
    """

    def plain_step(self, batch: Any, publish: Callable[..., None] | None) -> Any | None:
        """Run a step without drafts on a fast path, which skips the stages.

        Returns upstream's `GenerationBatchResult`; None: the batch needs the stages.
        """

    def begin_prefill(self, batch: Any) -> None:
        """Record a prefill that is launched next, whose features become the draft's context."""

    def draft(self, batch: Any, window: Any, depth: int, seeds: Seeds | None) -> Any:
        """Return upstream's `DraftProposal` of `depth` drafts a request, its tokens gamma wide.

        window: upstream's, [R, gamma + 1].
        """

    def accepts_in_graph(self, requests: int, admitted: int) -> bool:
        """Return whether the verify pass runs in a graph that contains the greedy accept rule."""

    def admit(self, engine: Engine, step: Step, logits: Tensor | None) -> Tensor:
        """Return indptr [R + 1] int32 on the device: R + `verify.admitted_drafts` rows to verify.

        logits: [R, d] confidence logits of this step's drafts; None where nothing was drafted.
        """

    def layout(self, step: Step, indptr: Tensor) -> Any:
        """Make upstream's `RaggedVerifyLayout` of indptr [R + 1]."""

    def run(self, inputs: VerifyInput) -> VerifyOutput:
        """Run the target over the windows."""

    def accept(self, inputs: VerifyInput, verified: VerifyOutput) -> Any:
        """Return upstream's `AcceptOuts`: accepted drafts, bonus and emitted tokens, lengths."""

    def commit(self, inputs: VerifyInput, verified: VerifyOutput, accepted: Any) -> None:
        """Write hidden states of the accepted rows, or of all, to the draft's context.

        Every step that runs the stages commits, with or without drafts. Rejected rows are never
        read. A CPU may delay the write until a draft reads the rows (backends/cpu/context_kv.py).
        """
