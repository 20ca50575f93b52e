"""Run our draft steps and accept rule in the graphs of a DSPARK worker on a GPU.

Upstream: sglang/srt/speculative/dspark_components/{dspark_verify,dspark_draft}.py.
The tail of the draft's graph (dspark_draft_sampler.py) imports `draft_markov_block` by name. A
vanilla head's steps in that graph stay SGLang's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.patches.seam import Seams

SEAMS = Seams(device="cuda")


@SEAMS.around(
    "cuda-graph-accept",
    "sglang.srt.speculative.dspark_components.dspark_verify.DsparkVerifyEpilogue._accept",
    signature="(self, *, candidates, logits, draft_tokens, seq_lens, cutoff_verify_lens=None)",
    why="upstream searches rows that are not verified and needs a dozen launches for the rest",
)
def accept_in_graph(original: Callable[..., Any], epilogue: Any, **given: Any) -> Any:
    """AROUND hook of `_accept`: run our accept rule at the end of a graph of a verify pass."""
    from sglang_dspark.backends.cuda.accept_in_graph import accept

    return accept(original, epilogue, **given)


@SEAMS.around(
    "cuda-draft-steps",
    "sglang.srt.speculative.dspark_components.dspark_draft.draft_markov_block",
    signature="(*, markov_head, base_logits, anchor_tokens, draft_hidden, step_temperatures, "
    "noise, tp_sync, logits_out=None, greedy_draft=False)",
    why="upstream launches a product and two kernels for every position of a block",
)
def draft_markov_block(original: Callable[..., Any], **block: Any) -> Any:
    """AROUND hook: draw the tokens of a block in one launch; return them and their logits."""
    from sglang_dspark.backends.cuda.draft import draft_steps

    return draft_steps(original, **block)
