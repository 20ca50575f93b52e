"""Draw a request's tokens by its seed in plain decoding and in prefill on a CPU.

Upstream: sglang/srt/sampling/sampling_batch_info.py and sglang/srt/layers/sampler.py. SGLang reads
a request's `sampling_seed` (OpenAI: `seed`) only under --enable-deterministic-inference, which no
CPU backend has. Here every batch carries the seeds in upstream's own field
`SamplingBatchInfo.sampling_seed` [R] int64, which upstream filters, merges and copies. A request
without a seed has UNSEEDED there and is sampled by upstream. The step reads seeds from the requests
(step/seeds.py). Both draws would raise on a row without probability, so they repair such rows first
(backends/cpu/lost_rows.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu import seeded_ops
from sglang_dspark.backends.cpu.accept import replace_nan_rows
from sglang_dspark.patches.seam import Seam
from sglang_dspark.verify.sampling import truncate

UNSEEDED = -(2**63)  # as a request's own seed it means none


def batch_seeds(reqs: Sequence[Any]) -> Tensor:
    """Return the seeds of SGLang's requests, [R] int64."""
    seeds = [req.sampling_params.sampling_seed for req in reqs]
    return torch.tensor([UNSEEDED if seed is None else seed for seed in seeds], dtype=torch.int64)


def seeded_tokens(tokens: Tensor, probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw the tokens [R] of seeded requests again, from probs [R, V] float."""
    seeded = seeds != UNSEEDED
    if bool(seeded.any()):
        drawn = seeded_ops.choose(probs[seeded].float(), seeds[seeded], positions[seeded].long())
        tokens[seeded] = drawn.to(tokens.dtype)
    return tokens


def keep_seeds(result: Any, cls: type, batch: Any, vocab_size: int) -> Any:
    """AFTER hook of `from_schedule_batch`: put the requests' seeds into the batch."""
    algorithm = batch.spec_algorithm
    if result.sampling_seed is None and (algorithm.is_none() or algorithm.is_dspark()):
        result.sampling_seed = batch_seeds(batch.reqs)
    return result


def sample(
    original: Callable[..., Tensor],
    probs: Tensor,
    sampling_seed: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """AROUND hook of `sampling_from_probs_torch`: draw one token a row of probs [R, V]."""
    tokens = original(replace_nan_rows(probs))
    if sampling_seed is None or positions is None:
        return tokens
    return seeded_tokens(tokens, probs, sampling_seed, positions)


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
    """AROUND hook: draw one token a row of probs [R, V] after top-k, top-p and min-p."""
    replace_nan_rows(probs)
    drawn = original(probs, top_ks, top_ps, min_ps, need_min_p_sampling, None, positions, **options)
    if sampling_seed is None:
        return drawn
    kept_probs = truncate(probs, top_ks, top_ps, min_ps)
    if not isinstance(drawn, tuple):
        return seeded_tokens(drawn, kept_probs, sampling_seed, positions)
    tokens, kept, ids, _ = drawn  # with the weights that were kept, and whose they are
    tokens = seeded_tokens(tokens, kept_probs, sampling_seed, positions)
    return tokens, kept, ids, (kept * (ids == tokens[:, None])).sum(dim=1)


SEAMS = (
    Seam(
        name="cpu-seeds",
        target="sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
        kind="after",
        hook=keep_seeds,
        signature="(batch, vocab_size)",
        why="upstream drops a request's seed unless inference is deterministic, which no CPU has",
        device="cpu",
    ),
    Seam(
        name="cpu-seeded-sampling",
        target="sglang.srt.layers.sampler.sampling_from_probs_torch",
        kind="around",
        hook=sample,
        signature="(probs, sampling_seed=None, positions=None)",
        why="upstream's seeded draw needs an operator that stock wheels lack on a CPU",
        device="cpu",
    ),
    Seam(
        name="cpu-seeded-cuts",
        target="sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        kind="around",
        hook=sample_after_cuts,
        signature="(probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, "
        "*, return_filtered_probs=False, max_top_k=None)",
        why="upstream's seeded draw needs an operator that stock wheels lack on a CPU",
        device="cpu",
    ),
)
