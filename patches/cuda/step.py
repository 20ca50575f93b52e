"""Run our draft steps, accept rule and commit in the graphs of a DSPARK worker on a GPU.

Upstream: sglang/srt/speculative/dspark_components/{dspark_verify,dspark_draft}.py.
The tail of the draft's graph (dspark_draft_sampler.py) imports `draft_markov_block` by name.
SGLang still runs a vanilla head's steps in that graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.patches.seam import Seams

SEAMS = Seams(device="cuda")


@SEAMS.around(
    "cuda-graph-epilogue",
    "sglang.srt.speculative.dspark_components.dspark_verify.DsparkVerifyEpilogue.capture_hook",
    signature="(self, runner, out, forward_batch, num_tokens)",
    why="upstream scatters logits to windows of all slots, needs a dozen launches to accept, and "
    "leaves the commit of a dense draft to the host",
)
def end_of_graph(original: Callable[..., None], epilogue: Any, *given: Any) -> None:
    """Accept and commit on the packed rows of a verify pass (AROUND hook of `capture_hook`)."""
    from sglang_dspark.backends.cuda.graph_epilogue import run

    run(original, epilogue, *given)


@SEAMS.around(
    "cuda-draft-steps",
    "sglang.srt.speculative.dspark_components.dspark_draft.draft_markov_block",
    signature="(*, markov_head, base_logits, anchor_tokens, draft_hidden, step_temperatures, "
    "noise, tp_sync, logits_out=None, greedy_draft=False)",
    why="upstream launches a product and two kernels for every position of a block",
)
def draft_markov_block(original: Callable[..., Any], **block: Any) -> Any:
    """Draw a block's tokens in one launch; return them and their logits (AROUND hook)."""
    from sglang_dspark.backends.cuda.draft import draft_steps

    return draft_steps(original, **block)
