"""Accept drafts on an accelerator: by a Triton operator on a GPU, else by torch (step/accept.py).

Both judge by block or token by token, as configured (`verify.rule`), read the same uniforms and
emit the same tokens. The operators store no probabilities of the whole vocabulary: at 256 requests
of 8 rows and 152k tokens torch makes several tensors of 1.2 GB.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.kernels.accept_block import accept_block_triton
from sglang_dspark.kernels.accept_sampled import accept_triton
from sglang_dspark.kernels.accept_windows import Windows, why_not
from sglang_dspark.kernels.platform import runs_on
from sglang_dspark.serving.config import current_config
from sglang_dspark.step.accept import accept, uniforms
from sglang_dspark.step.seeds import Seeds
from sglang_dspark.verify.acceptance import Acceptance

logger = logging.getLogger(__name__)
_ROOM = 256  # requests that the first counters are for


class StepAccept:
    """Chooses the way of each step; says once why a GPU does it in torch."""

    def __init__(self) -> None:
        self._arrivals: Tensor | None = None
        self._logged = False
        self._rule = current_config().verify.rule

    def __call__(
        self,
        ids: Tensor,
        lens: Tensor,
        logits: Tensor,
        draft_block: Any,
        sampling_info: Any,
        anchors: Tensor,
        seeds: Seeds | None,
    ) -> Acceptance:
        """Accept the drafts of a sampled step; arguments of `step.accept.accept`."""
        if runs_on(logits.device):
            given = windows(ids, lens, logits, draft_block, sampling_info, anchors, seeds)
            reason = why_not(given)
            if reason is None:
                operator = accept_triton if self._rule == "token" else accept_block_triton
                return Acceptance(*operator(given, self._counters(len(ids), ids.device)))
            if not self._logged:
                logger.warning("sampled drafts are accepted in torch: %s", reason)
                self._logged = True
        return accept(ids, lens, logits, draft_block, sampling_info, anchors, seeds)

    def _counters(self, requests: int, device: torch.device) -> Tensor:
        """Of the operator's programs, made anew for a larger batch than any before."""
        if self._arrivals is None or len(self._arrivals) < requests:
            room = max(2 * requests, _ROOM)
            self._arrivals = torch.zeros(room, dtype=torch.int32, device=device)
        return self._arrivals


def windows(
    ids: Tensor,
    lens: Tensor,
    logits: Tensor,
    draft_block: Any,
    sampling_info: Any,
    anchors: Tensor,
    seeds: Seeds | None,
) -> Windows:
    """The operators' arguments, of those of `step.accept.accept`."""
    given = unseeded_windows(ids, lens, logits, draft_block, sampling_info)
    return replace(given, **_seeded(len(ids), anchors, seeds))


def unseeded_windows(
    ids: Tensor, lens: Tensor, logits: Tensor, draft_block: Any, sampling_info: Any
) -> Windows:
    """The arguments of `accept_listed_triton`, of those of `step.accept.accept`."""
    requests, width = ids.shape
    info, dense = sampling_info, not draft_block.greedy_draft
    mask = draft_block.greedy_mask
    cut = info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling
    # Every pattern of None compiles a kernel of its own: settings that no request uses are
    # given too, where they cost a load. Cuts cost a pass over the row.
    return Windows(
        # A copy even where one request's drafts are contiguous: they begin 8 bytes into a row, and
        # Triton compiles anew for pointers that are not multiples of 16.
        drafts=ids[:, 1:].clone(memory_format=torch.contiguous_format),
        lengths=lens - 1,
        logits=logits,
        temperatures=info.temperatures.reshape(-1),
        accept_uniforms=uniforms(requests, width - 1, like=logits),
        bonus_uniforms=uniforms(requests, like=logits),
        top_k=info.top_ks.reshape(-1) if cut else None,
        top_p=info.top_ps.reshape(-1) if cut else None,
        min_p=info.min_ps.reshape(-1) if cut else None,
        draft_logits=draft_block.corrected_logits if dense else None,
        draft_temperatures=draft_block.temperatures.reshape(-1) if dense else None,
        greedy=mask if info.is_any_greedy else torch.zeros_like(mask),
    )


def _seeded(requests: int, anchors: Tensor, seeds: Seeds | None) -> dict[str, Tensor]:
    """By request, what `seeds` has of some."""
    values = torch.zeros(requests, dtype=torch.int64, device=anchors.device)
    named = torch.zeros_like(values, dtype=torch.bool)
    if seeds is not None:
        named = named.index_fill(0, seeds.rows, True)
        values = values.index_copy(0, seeds.rows, seeds.values)
    return {"seeded": named, "seeds": values, "anchors": anchors.long()}
