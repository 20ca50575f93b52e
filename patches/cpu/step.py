"""A DSPARK worker on a CPU is taken over when it is ready; upstream's relay is not needed then.

Upstream: sglang/srt/speculative/dspark_components/dspark_worker_v2.py, `init_cuda_graphs`,
the last step of a worker's start (pools and attention backends stand), and
sglang/srt/managers/overlap_utils.py, `decide_needs_confidence_relay`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.patches.seam import Seam


def attach_step(result: None, worker: Any) -> None:
    """AFTER hook of `DSparkWorkerV2.init_cuda_graphs`."""
    from sglang_dspark.backends.cpu.attach import attach

    attach(worker)


def needs_confidence_relay(original: Callable[[], bool]) -> bool:
    """AROUND hook: our planner has a relay of its own, tagged with tenants."""
    from sglang_dspark.serving import mode

    return original() and not mode.choice().ours


SEAMS = (
    Seam(
        name="cpu-step-attach",
        target="sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2."
        "init_cuda_graphs",
        kind="after",
        hook=attach_step,
        signature="(self)",
        why="step times are measured, and the step is put in place, before the first request",
        device="cpu",
    ),
    Seam(
        name="cpu-step-relay",
        target="sglang.srt.managers.overlap_utils.decide_needs_confidence_relay",
        kind="around",
        hook=needs_confidence_relay,
        signature="()",
        why="upstream would copy confidences that nobody reads, in every step",
        device="cpu",
    ),
)
