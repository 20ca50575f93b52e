"""Draft on a GPU: the sequential head's steps in one launch, else SGLang's.

Upstream, sglang/srt/speculative/dspark_components/dspark_draft.py (`draft_markov_block`),
launches a product and two kernels or more for each position, in the draft's graph and outside of
it. The operator draws the same drafts from the same noise, except where rounding decides, and
saves the same logits. Nothing is read back; counters of a captured launch keep their addresses.

On an H200 (results/gpu_markov_h200.json) the operator needs a quarter to two thirds of the time of
SGLang's steps outside of graphs. In a graph, where a launch costs less, SGLang's steps of sampled
blocks were faster at 1, 4 and 64 requests: a vanilla head's steps are captured unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cuda.chain_model import ChainHead
from sglang_dspark.backends.cuda.reduced_vocabulary import reduced_of
from sglang_dspark.kernels.markov_blocks import Blocks, Noise, mixing_of, why_not
from sglang_dspark.kernels.markov_sample import markov_triton
from sglang_dspark.kernels.platform import runs_on
from sglang_dspark.serving import mode, upstream

logger = logging.getLogger(__name__)
# Of CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE, which leaves the device as it was.
_TOO_LARGE = "cooperative launch"
Drafted = tuple[Tensor, Tensor | None]


class DraftSteps:
    """Choose the operator or SGLang's steps for each block; log once why a GPU uses SGLang's."""

    def __init__(self) -> None:
        # By size, never freed: a captured graph has their addresses.
        self._scratch: dict[tuple[torch.device, int], Tensor] = {}
        self._logged: set[str] = set()
        self._fits = True

    def __call__(self, original: Callable[..., Drafted], **block: Any) -> Drafted:
        """Draft a block by the arguments of upstream's function: tokens, logits [R, gamma, V]."""
        reduced = reduced_of(block.get("markov_head"))
        steps = original if reduced is None else reduced.draft
        if not runs_on(block["base_logits"].device) or not mode.choice().ours:
            return steps(**block)
        head = block["markov_head"]
        if isinstance(head, ChainHead) or theirs_is_quicker(**block) or not self._fits:
            return steps(**block)
        reason = obstacle(head, block["tp_sync"])
        given = blocks(**block) if reason is None else None
        reason = reason if given is None else why_not(given)
        if given is None or reason is not None:
            self._tell(str(reason))
            return steps(**block)
        tokens = self._launched(given)
        if tokens is None:
            return steps(**block)
        if given.noise is not None:
            given.noise.offset.add_(1)  # as upstream's, for the next block's noise
        return tokens, given.logits

    def _launched(self, given: Blocks) -> Tensor | None:
        """Draft tokens [R, gamma]; None if the launch does not fit, now and from now on.

        Under MPS or in a green context a process has fewer multiprocessors than the device reports.
        Then nothing was launched, so counters and noise are unchanged.
        """
        try:
            return markov_triton(given, self._counters(given)).tokens
        except RuntimeError as error:
            if _TOO_LARGE not in str(error):
                raise
            self._fits = False
            self._tell(f"it does not fit this process's part of the GPU ({error})")
            return None

    def _tell(self, reason: str) -> None:
        if reason not in self._logged:
            logger.warning("drafts are SGLang's steps, not one launch: %s", reason)
            self._logged.add(reason)

    def _counters(self, given: Blocks) -> Tensor:
        requests, gamma, _ = given.base.shape
        key = (given.base.device, 1 + gamma * requests)
        if key not in self._scratch:
            self._scratch[key] = torch.zeros(key[1], dtype=torch.int64, device=key[0])
        return self._scratch[key]


draft_steps = DraftSteps()


def obstacle(head: Any, tp_sync: Any) -> str | None:
    """Return the part of a head or its ranks that the operator does not support, or None."""
    heads = (upstream.VanillaMarkov, upstream.GatedMarkovHead, upstream.RNNHead)
    other = upstream.other_class("its head", head, *heads)
    if other is not None:
        return other
    if head.vocab_shard is not None:
        return "the vocabulary is split over ranks"
    if tp_sync.enabled(upstream.SpecTpSyncSite.DSPARK_DRAFT):
        return "ranks agree on each draft before the next"
    return None


def theirs_is_quicker(markov_head: Any, logits_out: Tensor | None = None, **_block: Any) -> bool:
    """Return whether a block is in a graph with saved logits and of a measured head.

    Only then, warm-up included, upstream passes a buffer for the logits.
    """
    return logits_out is not None and type(markov_head) is upstream.VanillaMarkov


def blocks(
    *,
    markov_head: Any,
    base_logits: Tensor,
    anchor_tokens: Tensor,
    draft_hidden: Tensor | None,
    step_temperatures: Tensor,
    noise: Any,
    tp_sync: Any,
    logits_out: Tensor | None = None,
    greedy_draft: bool = False,
) -> Blocks:
    """Convert the arguments of upstream's `draft_markov_block` to the operator's."""
    reduced = reduced_of(markov_head)
    plain = Blocks(
        base=base_logits,
        anchors=anchor_tokens.long(),
        w1=markov_head.markov_w1.weight,
        w2=markov_head.markov_w2.weight if reduced is None else reduced.w2,
        draft_ids=None if reduced is None else reduced.tokens,
    )
    if logits_out is None and not greedy_draft:
        if reduced is None:
            logits_out = torch.empty_like(base_logits, dtype=plain.step_dtype)
        else:  # logits of tokens outside are not written
            shape = (*base_logits.shape[:2], reduced.width)
            logits_out = base_logits.new_full(shape, -torch.inf, dtype=plain.step_dtype)
    return replace(
        plain,
        temperatures=None if greedy_draft else step_temperatures,
        noise=None if greedy_draft else Noise(noise.key, noise.offset),
        logits=None if greedy_draft else logits_out,
        mixing=mixing_of(markov_head, draft_hidden),
    )
