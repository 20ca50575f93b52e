"""The law that SGLang's plain decoding samples from, for the rows of a verify pass on a CPU.

Stands for `build_speculative_verify_target_probs` (sglang/srt/speculative/dflash_utils.py),
which leaves out min-p, and normalises between top-k and top-p: with both set it keeps other tokens
than the sampler of plain decoding (srt/layers/sampler.py, `top_k_top_p_min_p_sampling_from_probs_
torch`), so that drafts would change the law.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu.lost_rows import settle_lost
from sglang_dspark.verify import BatchSampling, target_distribution


def target_law(logits: Tensor, sampling_info: Any, rows: int | Tensor) -> Tensor:
    """Probabilities of each row's next token: [B, V] -> [B, V] float32.

    sampling_info: SGLang's `SamplingBatchInfo` of R requests; greedy ones have top-k 1 there.
    rows: how many rows belong to each request, one number or [R] int64; requests in order.
    """
    settings = BatchSampling(
        temperature=_by_row(sampling_info.temperatures, rows),
        top_k=_by_row(sampling_info.top_ks, rows),
        top_p=_by_row(sampling_info.top_ps, rows),
        min_p=_by_row(sampling_info.min_ps, rows),
    )
    return settle_lost(target_distribution(logits[:, None], settings)[:, 0])


def _by_row(values: Tensor, rows: int | Tensor) -> Tensor:
    return values.reshape(-1).repeat_interleave(rows, 0)


def build_target_probs(
    *,
    next_token_logits: Tensor,
    sampling_info: Any,
    draft_token_num: int,
    bs: int,
    max_top_k: int | None = None,
    uniform_top_k_value: int | None = None,
    use_sparse_topk: bool = True,
) -> Tensor:
    """Upstream's function: [bs * draft_token_num, V] logits -> [bs, draft_token_num, V] float32.

    The last three arguments are hints for upstream's sort, and not needed.
    """
    probs = target_law(next_token_logits, sampling_info, draft_token_num)
    return probs.view(bs, draft_token_num, -1).to(torch.float32).contiguous()
