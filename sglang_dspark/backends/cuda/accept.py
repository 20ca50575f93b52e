"""Accept drafts on an accelerator: by Triton operators on a GPU, else by torch (step/accept.py).

Both judge by block or token by token, as configured (`verify.rule`), read the same uniforms and
emit the same tokens. Requests with cuts are judged on lists of the likeliest tokens, and by the
operator on whole rows where a list is incomplete; this choice reads nothing back. The operators
store no probabilities of the whole vocabulary: at 256 requests of 8 rows and 152k tokens torch
makes several tensors of 1.2 GB.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_dspark.kernels.accept_block import accept_block_triton
from sglang_dspark.kernels.accept_listed import accept_listed_triton
from sglang_dspark.kernels.accept_sampled import Outcome, accept_triton
from sglang_dspark.kernels.accept_windows import Windows, why_not
from sglang_dspark.kernels.platform import runs_on
from sglang_dspark.serving.config import current_config
from sglang_dspark.step.accept import accept, uniforms
from sglang_dspark.step.rules import Cuts
from sglang_dspark.step.seeds import Seeds
from sglang_dspark.verify.acceptance import Acceptance

logger = logging.getLogger(__name__)
_ROOM = 256  # requests that the first buffers hold


class _Buffers(NamedTuple):
    """Zeros for each request. arrivals: int32, counters of the operators' programs. flags: bool,
    and values: int64, in place of seeds if no request has one."""

    arrivals: Tensor
    flags: Tensor
    values: Tensor


class StepAccept:
    """Choose the fast path of each step; log once why a GPU accepts by torch."""

    def __init__(self) -> None:
        self._buffers: _Buffers | None = None
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
        *,
        cuts: Cuts,
        rows: int,
    ) -> Acceptance:
        """Accept the drafts of a sampled step.

        Arguments as for `step.accept.accept`. cuts: of its sampled requests. rows: at least the
        number of rows verified, the sum of lens.
        """
        if runs_on(logits.device):
            given = windows(ids, lens, logits, draft_block, sampling_info, cut=cuts.kinds > 0)
            reason = why_not(given)
            if reason is None:
                return Acceptance(*self._by_operators(given, anchors, seeds, cuts, rows))
            if not self._logged:
                logger.warning("sampled drafts are accepted in torch: %s", reason)
                self._logged = True
        return accept(ids, lens, logits, draft_block, sampling_info, anchors, seeds)

    def _by_operators(
        self, given: Windows, anchors: Tensor, seeds: Seeds | None, cuts: Cuts, rows: int
    ) -> Outcome:
        requests, outcome = len(given.drafts), None
        buffers = self._zeros(requests, given.drafts.device)
        given = replace(given, **seeded(buffers, requests, anchors, seeds))
        if cuts.kinds and (seeds is None or len(seeds.rows) < requests):
            found = accept_listed_triton(given, most=cuts.most, rows=rows, rule=self._rule)
            outcome = Outcome(found.accepted, found.bonus)
            if cuts.listed is not None and seeds is None:
                return outcome  # lists at least as long as the largest top-k are complete
            given = replace(given, skipped=found.complete)
        operator = accept_triton if self._rule == "token" else accept_block_triton
        return operator(given, buffers.arrivals, into=outcome)

    def _zeros(self, requests: int, device: torch.device) -> _Buffers:
        """Return the buffers, allocated again for a larger batch than any before."""
        if self._buffers is None or len(self._buffers.arrivals) < requests:
            room = max(2 * requests, _ROOM)
            types = (torch.int32, torch.bool, torch.int64)
            self._buffers = _Buffers(*(torch.zeros(room, dtype=t, device=device) for t in types))
        return self._buffers


def windows(
    ids: Tensor,
    lens: Tensor,
    logits: Tensor,
    draft_block: Any,
    sampling_info: Any,
    *,
    cut: bool,
) -> Windows:
    """Convert arguments of `step.accept.accept` to the operators', without seeds.

    cut: whether a sampled request has a cut; SGLang's own flags count greedy requests too."""
    requests, width = ids.shape
    info, dense = sampling_info, not draft_block.greedy_draft
    mask = draft_block.greedy_mask
    # Every pattern of None compiles another kernel: settings that no request uses are passed
    # too if they cost only a load. Cuts cost a pass over the row.
    return Windows(
        # A copy even where one request's drafts are contiguous: they begin 8 bytes into a row, and
        # Triton compiles again for pointers that are not multiples of 16.
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


def seeded(
    buffers: _Buffers, requests: int, anchors: Tensor, seeds: Seeds | None
) -> dict[str, Tensor]:
    """Spread `seeds` over all requests; without seeds return zeros in the same fields, as every
    pattern of None compiles another kernel."""
    flags, values = buffers.flags[:requests], buffers.values[:requests]
    if seeds is None:
        return {"seeded": flags, "seeds": values, "anchors": values}
    return {
        "seeded": flags.index_fill(0, seeds.rows, True),
        "seeds": values.index_copy(0, seeds.rows, seeds.values),
        "anchors": anchors.long(),
    }
