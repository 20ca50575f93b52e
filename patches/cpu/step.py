"""Attach our decode step to a ready DSPARK worker on a CPU, without upstream's relay.

Upstream: `init_cuda_graphs` in sglang/srt/speculative/dspark_components/dspark_worker_v2.py, the
last stage of a worker's start (pools and attention backends exist), and
`decide_needs_confidence_relay` in sglang/srt/managers/overlap_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.patches.seam import Seam


def attach_step(result: None, worker: Any) -> None:
    """AFTER hook of `DSparkWorkerV2.init_cuda_graphs`: put our step on the worker."""
    from sglang_dspark.backends.cpu.attach import attach

    attach(worker)


def needs_confidence_relay(original: Callable[[], bool]) -> bool:
    """AROUND hook: disable upstream's relay, as our planner has one, tagged with generations."""
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
        why="upstream would copy confidences in every step, which our planner does not read",
        device="cpu",
    ),
)
