"""The draft's sequential steps are one launch on a GPU; a vanilla head's in the draft's graph stay
SGLang's.

Upstream: sglang/srt/speculative/dspark_components/dspark_draft.py, whose function the
graph's tail (dspark_draft_sampler.py) imports by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.patches.seam import Seam


def draft_markov_block(original: Callable[..., Any], **block: Any) -> Any:
    """AROUND hook: tokens of a block, and the logits that they were drawn from."""
    from sglang_dspark.backends.cuda.draft import draft_steps

    return draft_steps(original, **block)


SEAMS = (
    Seam(
        name="cuda-draft-steps",
        target="sglang.srt.speculative.dspark_components.dspark_draft.draft_markov_block",
        kind="around",
        hook=draft_markov_block,
        signature=(
            "(*, markov_head, base_logits, anchor_tokens, draft_hidden, step_temperatures, noise, "
            "tp_sync, logits_out=None, greedy_draft=False)"
        ),
        why="upstream launches a product and two kernels for every position of a block",
        device="cuda",
    ),
)
