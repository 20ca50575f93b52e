"""Sample steps without drafts by plain decoding's own sampler: one row a request.

Upstream: sglang/srt/layers/sampler.py. Used only where its distribution is ours: without cuts,
or with only top-k or only top-p. With min-p FlashInfer normalises between the cuts, and it reads
no seeds. Memory: that of plain decoding, three rows of float32 a request: 0.47 GB at 256 requests
and a vocabulary of 151,936.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dspark.serving import upstream
from sglang_dspark.step.rules import Rules
from sglang_dspark.step.verify import VerifyInput

_BACKENDS = ("flashinfer", "pytorch")


def samples_as_plain(sampling_info: Any, rules: Rules) -> bool:
    """Return whether plain decoding's sampler has the distribution of these requests."""
    cuts = rules.cuts
    return (
        cuts is not None
        and rules.seeds is None
        and not cuts.min_p
        and cuts.kinds <= 1
        # --enable-deterministic-inference gives every request a seed.
        and sampling_info.sampling_seed is None
        and sampling_info.sampling_mask_batch_indices is None
        and upstream.get_exec().kernel.sampling_backend in _BACKENDS
    )


def samples_anchors(asked: VerifyInput) -> bool:
    """Return whether a step reads one row of logits a request, by plain decoding's sampler.

    Rows of windows, the rest zeros, would be gamma + 1 times as many: 0.6 GB at 128 requests.
    """
    batch, rules = asked.batch, asked.rules
    return (
        not asked.drafted
        and rules.penalties is None
        and rules.cuts is not None
        and rules.cuts.listed is None
        and samples_as_plain(batch.sampling_info, rules)
        and not (batch.has_grammar or batch.return_logprob)
    )


def plain_tokens(sampler: Any, logits: Tensor, width: int, batch: Any, rules: Rules) -> Tensor:
    """Draw the token after each anchor: [R] int64.

    sampler: upstream's. logits: [R * width, V]; the first row of each window is read, none is
    written.
    """
    info = batch.sampling_info
    rows = logits.view(-1, width, logits.shape[1])[:, 0]  # [R, V]
    probs = torch.softmax(rows.float() / info.temperatures, dim=-1)
    uncut = rules.cuts is not None and rules.cuts.kinds == 0
    # Greedy requests have a top-k of 1, which does not mark an uncut batch as cut.
    token, _ = sampler._sample_from_probs(probs, info, batch.seq_lens, uncut)
    if info.is_any_greedy:
        greedy = info.top_ks.reshape(-1) <= 1
        return torch.where(greedy, rows.argmax(-1), token.long())
    return token.long()  # type: ignore[no-any-return]
