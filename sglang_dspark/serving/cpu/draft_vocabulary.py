"""Drafters with a reduced vocabulary draft over it only, and greedy batches draw no noise.

Upstream: sglang/srt/models/dspark.py (`compute_base_logits`) and
sglang/srt/speculative/dspark_components/dspark_draft.py (`sample_draft_block`), whose CPU paths
span the whole vocabulary and keep it for every step. Base logits leave the first as
[rows, n] and are read by the second alone (the draft's graph tail, the other reader, does not
exist on a CPU). Any other head keeps upstream's path. The mathematics is serving/cpu/draft_head.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.serving import upstream
from sglang_dspark.serving.cpu import draft_head, linear_layers, packed_weights
from sglang_dspark.serving.cpu.fast_paths import fits, need, need_class
from sglang_dspark.serving.cpu.seeds import seeded_waits

_REDUCED = "dspark_reduced_head"  # attribute of upstream's markov head


def prepare_draft(result: Any, draft_model: Any, *, embed_tokens: Any, lm_head: Any) -> Any:
    """AFTER hook of `attach_shared_modules`, when both models' weights are loaded."""
    packed_weights.pack_draft(draft_model)
    linear_layers.adopt_plain_layers(draft_model)
    find_reduced_head(draft_model, lm_head)
    return result


def find_reduced_head(draft_model: Any, lm_head: Any) -> None:
    """Gather the rows that can be drafted, in the formats of the target and of the draft."""
    head, reduced = draft_model.markov_head, None
    if fits("drafting over a part of the vocabulary", lambda: _require_plain(head, lm_head)):
        reduced = draft_head.reduced_head(
            head.markov_w1.weight,
            head.markov_w2.weight,
            lm_head.weight,
            packed_weights.packed_copy,
        )
    setattr(head, _REDUCED, reduced)


def _require_plain(head: Any, lm_head: Any) -> None:
    method, ranks = getattr(lm_head, "quant_method", None), int(getattr(lm_head, "tp_size", 1))
    need_class("its head", head, upstream.VanillaMarkov)
    need(head.vocab_shard is None and ranks == 1, "the vocabulary is split over ranks")
    need(
        not upstream.should_apply_lm_head_quant_method(lm_head, method), "the LM head is quantised"
    )
    need(not getattr(lm_head, "use_intel_amx_backend", False), "the LM head is packed for AMX")
    ours = lm_head.weight.is_floating_point() or packed_weights.holds(lm_head)
    need(ours, "the LM head is quantised")
    need(lm_head.weight.shape[0] >= head.vocab_size, "the LM head has fewer tokens than the draft")


def compute_base_logits(
    original: Callable[..., tuple[Tensor, Tensor]], draft_model: Any, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """AROUND hook: hidden [rows, d] -> base logits [rows, n or V], features of the confidence."""
    reduced = getattr(draft_model.markov_head, _REDUCED, None)
    if reduced is None:
        return original(draft_model, hidden)
    scale = draft_model.logits_mup_width_multiplier
    return draft_head.base_logits(reduced, hidden / scale if scale else hidden), hidden


def sample_draft_block(original: Callable[..., Any], **kwargs: Any) -> Any:
    """AROUND hook of `sample_draft_block`; a greedy batch is marked as drafted greedily.

    With that mark nothing reads step logits, which upstream keeps and noises in every case.
    """
    sampling = kwargs["sampling_info"]
    greedy = kwargs["greedy_draft"] or sampling is None or sampling.is_all_greedy
    reduced = getattr(kwargs["markov_head"], _REDUCED, None)
    if reduced is None:
        return original(**{**kwargs, "greedy_draft": greedy})
    return _draft(reduced, greedy, **kwargs)


def _draft(
    reduced: draft_head.ReducedHead,
    greedy: bool,
    *,
    base_logits: Tensor,  # [R, gamma, n]
    anchor_tokens: Tensor,  # [R]
    sampling_info: Any,
    noise: Any,
    device: torch.device,
    tp_sync: Any,
    **unused: Any,
) -> Any:
    bs, gamma = base_logits.shape[:2]
    agree = partial(tp_sync.sync, upstream.SpecTpSyncSite.DSPARK_DRAFT)
    if greedy:
        params, logits = _greedy_params(bs, device), None
        together = agree if tp_sync.enabled(upstream.SpecTpSyncSite.DSPARK_DRAFT) else None
        tokens = draft_head.draft_greedy(reduced, base_logits, anchor_tokens.long(), together)
    else:
        params = upstream.resolve_draft_params(sampling_info=sampling_info, bs=bs, device=device)
        uniforms = draft_head.block_uniforms(noise.key, int(noise.offset), (bs, gamma))
        waits = seeded_waits(sampling_info, reduced.tokens, gamma)
        temperatures = params.step_temperatures
        tokens, logits = draft_head.draft_sampled(
            reduced, base_logits, anchor_tokens, temperatures, uniforms, agree, waits
        )
        noise.offset.add_(1)
    return upstream.DraftBlockResult(
        draft_tokens=tokens,
        corrected_logits=logits,
        greedy_mask=params.greedy_mask,
        temperatures=params.temperatures,
        greedy_draft=greedy,
    )


@lru_cache(maxsize=64)
def _greedy_params(bs: int, device: torch.device) -> Any:
    """Upstream's parameters of `bs` greedy rows, which nobody writes to."""
    return upstream.resolve_draft_params(sampling_info=None, bs=bs, device=device)
