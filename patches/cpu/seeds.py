"""A request's seed acts on a CPU: in plain decoding and in prefill.

The hooks: `sglang_dspark/backends/cpu/seeded_sampling.py`.
"""

from __future__ import annotations

from sglang_dspark.backends.cpu import seeded_sampling
from sglang_dspark.patches.seam import Seam

SEAMS = (
    Seam(
        name="cpu-seeds",
        target="sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch",
        kind="after",
        hook=seeded_sampling.keep_seeds,
        signature="(batch, vocab_size)",
        why="upstream drops a request's seed unless inference is deterministic, which no CPU has",
        device="cpu",
    ),
    Seam(
        name="cpu-seeded-sampling",
        target="sglang.srt.layers.sampler.sampling_from_probs_torch",
        kind="around",
        hook=seeded_sampling.sample,
        signature="(probs, sampling_seed=None, positions=None)",
        why="upstream's seeded draw needs an operator that stock wheels lack on a CPU",
        device="cpu",
    ),
    Seam(
        name="cpu-seeded-cuts",
        target="sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
        kind="around",
        hook=seeded_sampling.sample_after_cuts,
        signature="(probs, top_ks, top_ps, min_ps, need_min_p_sampling, sampling_seed, positions, "
        "*, return_filtered_probs=False, max_top_k=None)",
        why="upstream's seeded draw needs an operator that stock wheels lack on a CPU",
        device="cpu",
    ),
)
