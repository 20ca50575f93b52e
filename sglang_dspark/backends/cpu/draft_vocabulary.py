"""Gather the heads of a drafter with a reduced vocabulary when its weights are loaded.

The mathematics of a reduced head is backends/cpu/reduced_head.py; any other head keeps upstream's.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.backends.cpu import packed_weights, reduced_head
from sglang_dspark.backends.cpu.fast_paths import require, require_class, supported
from sglang_dspark.serving import upstream

_REDUCED = "dspark_reduced_head"  # attribute of upstream's markov head


def find_reduced_head(draft_model: Any, lm_head: Any) -> None:
    """Gather the rows that can be drafted, in the formats of the target and of the draft."""
    head, reduced = draft_model.markov_head, None
    if supported("drafting over a part of the vocabulary", lambda: _require_plain(head, lm_head)):
        reduced = reduced_head.reduced_head(
            head.markov_w1.weight,
            head.markov_w2.weight,
            lm_head.weight,
            packed_weights.packed_copy,
        )
    setattr(head, _REDUCED, reduced)


def _require_plain(head: Any, lm_head: Any) -> None:
    method, ranks = getattr(lm_head, "quant_method", None), int(getattr(lm_head, "tp_size", 1))
    require_class("its head", head, upstream.VanillaMarkov)
    require(head.vocab_shard is None and ranks == 1, "the vocabulary is split over ranks")
    require(
        not upstream.should_apply_lm_head_quant_method(lm_head, method), "the LM head is quantised"
    )
    require(not getattr(lm_head, "use_intel_amx_backend", False), "the LM head is packed for AMX")
    ours = lm_head.weight.is_floating_point() or packed_weights.holds(lm_head)
    require(ours, "the LM head is quantised")
    require(
        lm_head.weight.shape[0] >= head.vocab_size, "the LM head has fewer tokens than the draft"
    )


def reduced_head_of(draft_model: Any) -> reduced_head.ReducedHead | None:
    """Return the head over the draft vocabulary; None where it is not reduced."""
    found: reduced_head.ReducedHead | None = getattr(draft_model.markov_head, _REDUCED, None)
    return found
