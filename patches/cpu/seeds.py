"""Draw a request's tokens by its seed in plain decoding and in prefill on a CPU.

Upstream: sglang/srt/sampling/sampling_batch_info.py and sglang/srt/layers/sampler.py. SGLang reads
a request's `sampling_seed` (OpenAI: `seed`) only under --enable-deterministic-inference, which no
CPU backend has. Here every batch carries the seeds in upstream's own field
`SamplingBatchInfo.sampling_seed` [R] int64, which upstream filters, merges and copies; a request
without one has UNSEEDED there. The step reads seeds from the requests (step/seeds.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu import seeded_ops
from sglang_dspark.backends.cpu.accept import replace_nan_rows
from sglang_dspark.patches.seam import Seams
from sglang_dspark.verify.sampling import truncate

SEAMS = Seams(device="cpu")
UNSEEDED = -(2**63)  # a request with this seed counts as unseeded


def batch_seeds(reqs: Sequence[Any]) -> Tensor:
    """Return the seeds of SGLang's requests, [R] int64."""
    seeds = [req.sampling_params.sampling_seed for req in reqs]
    return torch.tensor([UNSEEDED if seed is None else seed for seed in seeds], dtype=torch.int64)


@SEAMS.after(
    "cpu-seeds",
    "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
    signature="(batch, vocab_size)",
    why="upstream drops a request's seed unless inference is deterministic, which no CPU has",
)
def keep_seeds(result: Any, cls: type, batch: Any, vocab_size: int) -> Any:
    """Add the requests' seeds to the batch (AFTER hook of `from_schedule_batch`)."""
    algorithm = batch.spec_algorithm
    if result.sampling_seed is None and (algorithm.is_none() or algorithm.is_dspark()):
        result.sampling_seed = batch_seeds(batch.reqs)
    return result


@SEAMS.around(
    "cpu-seeded-sampling",
    "sglang.srt.layers.sampler.Sampler._sample_from_probs",
    signature="(self, probs, sampling_info, positions, simple_sampling_case)",
    why="upstream's seeded draw needs an operator that stock wheels lack on a CPU, and rows "
    "of NaN end its sampler",
)
def sample(
    original: Callable[..., tuple[Tensor, Any]],
    sampler: Any,
    probs: Tensor,
    sampling_info: Any,
    positions: Tensor,
    simple_sampling_case: bool,
) -> tuple[Tensor, Any]:
    """Draw one token a row of probs [R, V] (AROUND hook of `_sample_from_probs`).

    Upstream draws all rows without seeds; rows with a seed are then drawn again.
    """
    # A draw raises on a row without probability.
    info, seeds, probs = sampling_info, sampling_info.sampling_seed, replace_nan_rows(probs)
    info.sampling_seed = None
    try:
        tokens, capture = original(sampler, probs, info, positions, simple_sampling_case)
    finally:
        info.sampling_seed = seeds
    if seeds is None or not bool((seeded := seeds != UNSEEDED).any()):
        return tokens, capture
    if not simple_sampling_case:
        probs = truncate(probs, info.top_ks, info.top_ps, info.min_ps)
    drawn = seeded_ops.choose(probs[seeded].float(), seeds[seeded], positions[seeded].long())
    tokens[seeded] = drawn.to(tokens.dtype)
    if capture is not None:
        capture = capture._replace(selected_weight=None)  # computed again from the tokens
    return tokens, capture
