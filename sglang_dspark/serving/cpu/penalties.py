"""Frequency, presence and repetition penalties and min_new_tokens, row by row of a verify window.

Upstream's DSPARK worker applies none of them: it looks for `acc_linear_penalties`, a field
that `SamplingBatchInfo` no longer has, and its decode steps never count output tokens. Here each
row gets what plain decoding would apply there: a penalty depends on the tokens in front of it,
drafts of the same window included. The arithmetic is that of sglang/srt/sampling/penaltylib.

SGLang's overlap loop launches a step before the one in front of it is in `output_ids`. What is
missing there is known all the same: drafts of the window before, and the anchor.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_dspark.serving.step.penalties import is_penalised, stop_ids

logger = logging.getLogger(__name__)


def penalised(reqs: Sequence[Any]) -> list[int]:
    """Which requests have logits that depend on what they have put out so far."""
    return [r for r, req in enumerate(reqs) if is_penalised(req)]


class Window(NamedTuple):
    """A request's verify window: output tokens up to the anchor, anchor and drafts [gamma + 1]."""

    outputs: int
    tokens: list[int]


def apply_penalties(
    logits: Tensor,
    reqs: Sequence[Any],
    window: Tensor,
    anchors: Tensor,
    before: Mapping[str, Window],
) -> dict[str, Window]:
    """Penalise the logits of whole verify windows in place.

    logits: [R, W, V] float, W = gamma + 1 rows each. reqs: R of SGLang's `Req`. window: [R, W]
    int64, anchor and drafts. anchors: [R] int64, positions of the anchors. before: what the last
    call returned, windows of penalised requests by their ids; the same is returned for this step.
    Rows behind what was verified are penalised as well, and mean nothing.
    """
    now = {}
    for r in penalised(reqs):
        req, tokens = reqs[r], window[r].tolist()
        here = Window(int(anchors[r]) + 1 - len(req.origin_input_ids), tokens)
        outputs = _outputs(req, here, before.get(req.rid))
        for row, draft in zip(logits[r], (None, *tokens[1:]), strict=True):
            if draft is not None:
                outputs.append(draft)
            _penalise(row, req, outputs)
        now[req.rid] = here
    return now


def _outputs(req: Any, here: Window, last: Window | None) -> list[int]:
    """All tokens put out so far, the anchor included, also those that `output_ids` lacks yet."""
    outputs = list(req.output_ids)
    missing = here.outputs - len(outputs)
    if missing > 0:
        emitted = [here.tokens[0]]
        if last is not None:
            emitted = last.tokens[1 : here.outputs - last.outputs] + emitted
        outputs += emitted[-missing:]
    if len(outputs) != here.outputs or outputs[-1] != here.tokens[0]:
        _warn(f"{len(outputs)} of {here.outputs} output tokens are known")
    return outputs


@cache
def _warn(what: str) -> None:
    """Once for each case: a request's penalties are off by a token, which is no reason to stop."""
    logger.warning("sglang-dspark: penalties by what is listed: %s", what)


def _penalise(row: Tensor, req: Any, tokens: Sequence[int]) -> None:
    """One row [V] behind the output `tokens`: additive penalties first, then the factor."""
    params = req.sampling_params
    ids, counts = torch.tensor(tokens, device=row.device).unique(return_counts=True)
    seen = row[ids] - params.frequency_penalty * counts - params.presence_penalty
    factor = params.repetition_penalty
    row[ids] = torch.where(seen < 0, seen * factor, seen / factor).to(row.dtype)
    if len(tokens) < params.min_new_tokens:
        row[stop_ids(req)] = -torch.inf
