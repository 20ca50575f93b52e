"""Drafts by the served heads over given weights, without a server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu.reduced_head import ReducedHead
from sglang_dspark.step.seeds import Seeds

GREEDY = 1  # SGLang's top-k of a greedy request
ALL = 1 << 30  # and of one that wants all


def settings(
    temperatures: Tensor,
    top_ks: Tensor | None = None,
    top_ps: Tensor | None = None,
    min_ps: Tensor | None = None,
) -> Any:
    """Build the `SamplingBatchInfo` fields that drafting and accepting read, [R]; 0 is greedy."""
    rows = len(temperatures)
    greedy = temperatures == 0
    wanted = torch.full((rows,), ALL) if top_ks is None else top_ks
    return SimpleNamespace(
        temperatures=torch.where(greedy, 1.0, temperatures)[:, None],
        top_ks=torch.where(greedy, GREEDY, wanted).to(torch.int32),
        top_ps=torch.ones(rows) if top_ps is None else top_ps,
        min_ps=torch.zeros(rows) if min_ps is None else min_ps,
        is_all_greedy=bool(greedy.all()),
        is_any_greedy=bool(greedy.any()),
        sampling_seed=None,
    )


class Drafting:
    """The served heads with a reduced head of our own and its noise."""

    def __init__(self, tokens: Tensor, w1: Tensor, w2: Tensor, key: int = 7) -> None:
        from sglang.srt.speculative.dspark_components.dspark_draft import DraftNoise

        lm_head = torch.empty(len(tokens), 1)  # base logits are given
        self.head = ReducedHead(tokens, lm_head, w1, w2)
        self.noise = DraftNoise(key=key, offset=torch.zeros(1, dtype=torch.int64))

    def block(
        self,
        base: Tensor,
        anchors: Tensor,
        info: Any,
        positions: Tensor | None = None,
        seeds: Seeds | None = None,
        confidence: Tensor | None = None,
    ) -> Any:
        """base [R, gamma, n], anchors [R] -> upstream's `DraftBlockResult`.

        confidence: [R, gamma] float32 to fill, as a drafter without a head does.
        """
        from sglang_dspark.backends.cpu.draft import DraftHeads

        tp_sync = SimpleNamespace(sync=lambda site, x: x, enabled=lambda site: False)
        heads = DraftHeads(None, self.noise, tp_sync, self.head, greedy_only=False)
        where = torch.zeros_like(anchors) if positions is None else positions
        return heads.sample(base, anchors, torch.empty(0), info, where, seeds, confidence)
