"""A DSPARK worker on a GPU is taken over when its models, pools and graphs stand.

Upstream (0.5.23): sglang/srt/speculative/dspark_components/dspark_worker_v2.py.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.patches.seam import Seam


def attach_step(result: None, worker: Any) -> None:
    """AFTER hook of `init_cuda_graphs`."""
    from sglang_dspark.serving.cuda.attach import attach

    attach(worker)


SEAMS = (
    Seam(
        name="cuda-step-attach",
        target="sglang.srt.speculative.dspark_components.dspark_worker_v2.DSparkWorkerV2."
        "init_cuda_graphs",
        kind="after",
        hook=attach_step,
        signature="(self)",
        why="step times are measured, and the step is put in place, before the first request",
        device="cuda",
    ),
)
