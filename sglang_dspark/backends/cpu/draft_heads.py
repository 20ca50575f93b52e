"""Base logits and tokens of a draft block on a CPU, left to right (paper, 3.1.2).

Re-implements `sample_draft_block` (sglang/srt/speculative/dspark_components/dspark_draft.py) for
heads over a reduced vocabulary (draft_head.py), which upstream spans whole, with noise for greedy
requests too. Any other head is upstream's own.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu import draft_head, seeded_ops
from sglang_dspark.backends.cpu.draft_head import ReducedHead, SeededWaits
from sglang_dspark.backends.cpu.draft_vocabulary import reduced_head_of
from sglang_dspark.serving import upstream
from sglang_dspark.step.seeds import DraftSeeds, Seeds, draft_block


class DraftHeads:
    """The LM head and the sequential head of one draft model."""

    def __init__(self, model: Any, noise: Any, tp_sync: Any, *, greedy_only: bool) -> None:
        """noise, tp_sync: upstream's `DraftNoise` and `SpecTpSync`. greedy_only: sampled requests
        have greedy drafts too."""
        self._model, self._noise, self._tp_sync = model, noise, tp_sync
        self._greedy_only = greedy_only
        self._agree = partial(tp_sync.sync, upstream.SpecTpSyncSite.DSPARK_DRAFT)
        self._together = bool(tp_sync.enabled(upstream.SpecTpSyncSite.DSPARK_DRAFT))

    def base_logits(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [R * depth, d] -> U [R * depth, n], features of the confidence head."""
        reduced = reduced_head_of(self._model)
        if reduced is None:
            base, features = self._model.compute_base_logits(hidden)
            return base, features
        scale = self._model.logits_mup_width_multiplier
        return draft_head.base_logits(reduced, hidden / scale if scale else hidden), hidden

    def sample(
        self,
        base: Tensor,
        anchors: Tensor,
        hidden: Tensor,
        info: Any,
        positions: Tensor,
        seeds: Seeds | None,
    ) -> Any:
        """Upstream's `DraftBlockResult` of base logits [R, depth, n].

        anchors: [R] tokens, positions: [R] where they are. hidden: [R * depth, d]. info: the
        batch's sampling settings. seeds: of the sampled requests that have one.
        """
        greedy = self._greedy_only or info is None or info.is_all_greedy
        reduced = reduced_head_of(self._model)
        if reduced is not None:
            if greedy:
                return self._likeliest(reduced, base, anchors)
            waits = seeded_waits(seeds, positions, reduced.tokens, base.shape[1])
            return self._drawn(reduced, base, anchors, info, waits)
        options = {
            "base_logits": base,
            "anchor_tokens": anchors,
            "draft_hidden": hidden.view(*base.shape[:2], -1),
            "sampling_info": info,
            "markov_head": self._model.markov_head,
            "noise": self._noise,
            "device": base.device,
            "tp_sync": self._tp_sync,
        }
        if seeds is not None and not greedy:
            return draft_block(DraftSeeds(seeds, positions.long()), **options)
        # Upstream keeps and noises the logits of greedy requests too; nothing reads them.
        return upstream.sample_draft_block(**options, greedy_draft=greedy)

    def _likeliest(self, reduced: ReducedHead, base: Tensor, anchors: Tensor) -> Any:

        agree = self._agree if self._together else None
        params = _greedy_params(len(base))
        return upstream.DraftBlockResult(
            draft_tokens=draft_head.draft_greedy(reduced, base, anchors.long(), agree),
            corrected_logits=None,
            greedy_mask=params.greedy_mask,
            temperatures=params.temperatures,
            greedy_draft=True,
        )

    def _drawn(
        self,
        reduced: ReducedHead,
        base: Tensor,
        anchors: Tensor,
        info: Any,
        waits: SeededWaits | None,
    ) -> Any:

        params = upstream.resolve_draft_params(sampling_info=info, bs=len(base), device=base.device)
        key, offset = self._noise.key, int(self._noise.offset)
        tokens, logits = draft_head.draft_sampled(
            reduced,
            base,
            anchors,
            params.step_temperatures,
            draft_head.block_uniforms(key, offset, (base.shape[0], base.shape[1])),
            self._agree,
            waits,
        )
        self._noise.offset.add_(1)
        return upstream.DraftBlockResult(
            draft_tokens=tokens,
            corrected_logits=logits,
            greedy_mask=params.greedy_mask,
            temperatures=params.temperatures,
            greedy_draft=False,
        )


def seeded_waits(
    seeds: Seeds | None, anchors: Tensor, tokens: Tensor, depth: int
) -> SeededWaits | None:
    """The waits of a block's seeded requests; None where no request has a seed.

    anchors: [R] int64, positions. tokens: [n] int64, the draft vocabulary.
    """
    if seeds is None:
        return None
    positions = anchors[seeds.rows, None].long() + torch.arange(depth)  # [S, depth]
    drawn = seeded_ops.waits(seeds.values.repeat_interleave(depth), positions.flatten(), tokens)
    return SeededWaits(seeds.rows, drawn.view(*positions.shape, len(tokens)))


@lru_cache(maxsize=64)
def _greedy_params(requests: int) -> Any:
    """Upstream's parameters of greedy rows, to which nothing writes."""
    return upstream.resolve_draft_params(
        sampling_info=None, bs=requests, device=torch.device("cpu")
    )
