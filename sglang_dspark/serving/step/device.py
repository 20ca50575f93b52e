"""What differs between devices in a decode step, and nothing more."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from sglang_dspark.serving.step.clock import Clock
from sglang_dspark.serving.step.engine import Step


class Device(Protocol):
    """How one kind of device times, admits and lays out a step that was planned on the host.

    No method reads a value of the running step back to the host.
    """

    clock: Clock

    def admit(self, step: Step, logits: Tensor | None) -> Tensor:
        """Verify lengths l_r, [R] int32 on the device; they sum to `layout.admitted_drafts`.

        logits: [R, gamma] confidence logits of this step's drafts; None where nothing was drafted.
        """
        ...

    def pass_tokens(self, requests: int, admitted: int) -> int:
        """Tokens of the pass that verifies R + K: the tier of a captured graph, or R + K itself."""
        ...

    def to_host(self, values: Tensor) -> Tensor:
        """A copy on the host, complete when the step's result is; safe from later steps."""
        ...

    def accepts_in_graph(self, requests: int, admitted: int) -> bool:
        """Whether the verify pass runs in a graph that also holds the greedy accept rule."""
        ...
