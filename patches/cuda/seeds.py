"""Draw the first token and the drafts of a seeded request by its seed, under DSPARK on a GPU.

Upstream: sglang/srt/layers/sampler.py draws the first token, after the prefill, and
sglang/srt/speculative/dspark_components/dspark_draft.py the drafts. Neither reads a seed, and
FlashInfer's sampler refuses batches with one. The accept rule reads seeds in step/accept.py.
Plain decoding keeps upstream's samplers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sglang_dspark.backends.cuda.reduced_vocabulary import reduced_of
from sglang_dspark.patches.seam import Seams
from sglang_dspark.step import seeds

SEAMS = Seams(device="cuda")


@SEAMS.around(
    "cuda-seeded-first-token",
    "sglang.srt.layers.sampler.Sampler._sample_from_probs",
    signature="(self, probs, sampling_info, positions, simple_sampling_case)",
    why="upstream draws a request's first token without its seed",
)
def sample(
    original: Callable[..., tuple[Tensor, Any]],
    sampler: Any,
    probs: Tensor,
    sampling_info: Any,
    positions: Tensor,
    simple_sampling_case: bool,
) -> tuple[Tensor, Any]:
    """Draw seeded rows of probs [R, V] by their seeds (AROUND hook of `_sample_from_probs`)."""
    tokens, capture = original(sampler, probs, sampling_info, positions, simple_sampling_case)
    drawn = seeds.first_tokens(tokens, probs, sampling_info, positions)
    if drawn is not tokens and capture is not None:
        capture = capture._replace(selected_weight=None)  # computed again from the tokens
    return drawn, capture


@SEAMS.around(
    "cuda-seeded-draft",
    "sglang.srt.speculative.dspark_components.dspark_draft.sample_draft_block",
    signature="(*, base_logits, anchor_tokens, draft_hidden, sampling_info, markov_head, noise, "
    "device, tp_sync, greedy_draft)",
    why="drafts drawn without the seed are seldom what the seed chooses",
)
def sample_draft_block(original: Callable[..., Any], **block: Any) -> Any:
    """Draw the drafts of a step in which a request has a seed (AROUND hook)."""
    drawn = seeds.draft_seeds(block["sampling_info"])
    if drawn is None or block["greedy_draft"]:
        return original(**block)
    del block["greedy_draft"]
    reduced = reduced_of(block["markov_head"])
    return (seeds.draft_block if reduced is None else reduced.draft_by_seeds)(drawn, **block)
