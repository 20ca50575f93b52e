"""Frequency, presence and repetition penalties and min_new_tokens, row by row of a verify window.

Upstream's DSPARK worker (0.5.23) applies none of them: it looks for `acc_linear_penalties`, a field
that `SamplingBatchInfo` no longer has, and its decode steps never count output tokens. Here each
row gets what plain decoding would apply there: a penalty depends on the tokens in front of it,
drafts of the same window included. The arithmetic is that of sglang/srt/sampling/penaltylib.

It reads `output_ids`, which are up to date on a CPU: SGLang runs no overlap loop there with
speculative decoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def penalised(reqs: Sequence[Any]) -> list[int]:
    """Which requests have logits that depend on what they have put out so far."""
    return [r for r, req in enumerate(reqs) if _is_penalised(req)]


def _is_penalised(req: Any) -> bool:
    params = req.sampling_params
    return bool(
        params.frequency_penalty != 0.0
        or params.presence_penalty != 0.0
        or params.repetition_penalty != 1.0
        or len(req.output_ids) < params.min_new_tokens
    )


def apply_penalties(logits: Tensor, reqs: Sequence[Any], window: Tensor) -> None:
    """Penalise the logits of whole verify windows in place.

    logits: [R, W, V] float, W = gamma + 1 rows each. reqs: R of SGLang's `Req`. window: [R, W]
    int64, anchor (the last of `output_ids`) and drafts. Rows behind what was verified are
    penalised as well, and mean nothing.
    """
    for r in penalised(reqs):
        tokens = list(reqs[r].output_ids)
        anchor, *drafts = window[r].tolist()
        assert tokens[-1:] == [anchor], "the anchor is the last token that was put out"
        for row, draft in zip(logits[r], (None, *drafts), strict=True):
            if draft is not None:
                tokens.append(draft)
            _penalise(row, reqs[r], tokens)


def _penalise(row: Tensor, req: Any, tokens: Sequence[int]) -> None:
    """One row [V] behind the output `tokens`: additive penalties first, then the factor."""
    params = req.sampling_params
    ids, counts = torch.tensor(tokens, device=row.device).unique(return_counts=True)
    seen = row[ids] - params.frequency_penalty * counts - params.presence_penalty
    factor = params.repetition_penalty
    row[ids] = torch.where(seen < 0, seen * factor, seen / factor).to(row.dtype)
    if len(tokens) < params.min_new_tokens:
        row[_stop_ids(req)] = -torch.inf


def _stop_ids(req: Any) -> list[int]:
    """Tokens that may not come before min_new_tokens, as SGLang's penaliser lists them."""
    of_tokenizer = req.tokenizer.additional_stop_token_ids or set()
    found = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    return sorted(
        each
        for each in found | set(of_tokenizer) | {req.tokenizer.eos_token_id}
        if each is not None
    )
