"""A request's seed acts on a CPU: in plain decoding, in prefill and under DSPARK.

Upstream: sglang/srt/sampling/sampling_batch_info.py and sglang/srt/layers/sampler.py. The
drafts' noise is drawn in serving/cpu/draft_vocabulary.py, scheduled steps accept in
serving/cpu/device.py; EAGLE and the other algorithms keep upstream's ways. Both draws here are also
where a row without probability would raise (`lost_rows.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sglang_dspark.serving.cpu import seeds
from sglang_dspark.serving.cpu.lost_rows import settle_lost
from sglang_dspark.verify.sampling import truncate


def keep_seeds(result: Any, cls: type, batch: Any, vocab_size: int) -> Any:
    """AFTER hook of the class method: the batch carries its requests' seeds."""
    algorithm = batch.spec_algorithm
    if result.sampling_seed is None and (algorithm.is_none() or algorithm.is_dspark()):
        result.sampling_seed = seeds.batch_seeds(batch.reqs)
    return result


def sample(
    original: Callable[..., Tensor],
    probs: Tensor,
    sampling_seed: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """AROUND hook: one draw a row of probs [R, V]."""
    tokens = original(settle_lost(probs))
    if sampling_seed is None or positions is None:
        return tokens
    return seeds.seeded_tokens(tokens, probs, sampling_seed, positions)


def sample_after_cuts(
    original: Callable[..., Any],
    probs: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
    need_min_p_sampling: bool,
    sampling_seed: Tensor | None,
    positions: Tensor,
    **options: Any,
) -> Any:
    """AROUND hook: one draw a row of probs [R, V] after top-k, top-p and min-p."""
    settle_lost(probs)
    drawn = original(probs, top_ks, top_ps, min_ps, need_min_p_sampling, None, positions, **options)
    if sampling_seed is None:
        return drawn
    law = truncate(probs, top_ks, top_ps, min_ps)
    if not isinstance(drawn, tuple):
        return seeds.seeded_tokens(drawn, law, sampling_seed, positions)
    tokens, kept, ids, _ = drawn  # with the weights that were kept, and whose they are
    tokens = seeds.seeded_tokens(tokens, law, sampling_seed, positions)
    return tokens, kept, ids, (kept * (ids == tokens[:, None])).sum(dim=1)


def propose(original: Callable[..., Any], proposer: Any, **step: Any) -> Any:
    """AROUND hook: the drafts' noise depends on where a seeded request's anchor stands."""
    seeds.note_anchors(step["sampling_info"], step["verify_window"].positions_2d[:, 0])
    return original(proposer, **step)


def accept_and_finalize(original: Callable[..., Any], executor: Any, **step: Any) -> Any:
    """AROUND hook: whole windows of requests with seeds, which upstream's rule does not know."""
    if step["layout"] is not None or seeds.seeds_of(step["sampling_info"]) is None:
        return original(executor, **step)
    from sglang_dspark.serving.cpu.accept import accept_windows

    return accept_windows(
        step["verify_ids_2d"],
        step["target_logits"],
        step["draft_block"],
        step["sampling_info"],
        step["prefix_lens"],
        executor._tp_sync,
    )
