"""A DSPARK worker on a GPU is taken over when its models, pools and graphs stand.

Upstream: sglang/srt/speculative/dspark_components/dspark_worker_v2.py, dspark_verify.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.patches.seam import Seam


def attach_step(result: None, worker: Any) -> None:
    """AFTER hook of `init_cuda_graphs`."""
    from sglang_dspark.backends.cuda.attach import attach

    attach(worker)


def accept_in_graph(original: Callable[..., Any], epilogue: Any, **given: Any) -> Any:
    """AROUND hook of the accept rule that graphs of verify passes end with."""
    from sglang_dspark.backends.cuda.accept_in_graph import accept

    return accept(original, epilogue, **given)


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
    Seam(
        name="cuda-graph-accept",
        target="sglang.srt.speculative.dspark_components.dspark_verify.DsparkVerifyEpilogue."
        "_accept",
        kind="around",
        hook=accept_in_graph,
        signature="(self, *, candidates, logits, draft_tokens, seq_lens, cutoff_verify_lens=None)",
        why="upstream searches rows that nobody verifies and needs a dozen launches for the rest",
        device="cuda",
    ),
)
