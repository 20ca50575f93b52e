"""Count only verified drafts in an answer's `meta_info`, not gamma for every step.

Upstream (sglang/srt/managers/tokenizer_manager.py) computes `spec_num_proposed_drafts` as
steps times gamma. Under confidence scheduling a step verifies fewer, or none; the acceptance rate
of a request without drafts is then 0. `spec_cap_lens_histogram` has the verified tokens.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.patches.seam import Seams

SEAMS = Seams()
RATE, PROPOSED = "spec_accept_rate", "spec_num_proposed_drafts"


@SEAMS.after(
    "drafted-counts",
    "sglang.srt.managers.tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics",
    signature="(self, meta_info, recv_obj, i)",
    why="upstream counts gamma drafts a step, also where scheduling verified fewer or none",
)
def count_drafted(result: None, self: Any, meta_info: dict[str, Any], *given: Any) -> None:
    """Correct the two fields in place (AFTER hook of `_calculate_spec_decoding_metrics`).

    Both are absent from an answer for which no draft was verified. `spec_cap_lens_histogram[w]`
    counts steps that verified w tokens, the anchor and w - 1 drafts; other steps verified all.
    """
    lengths = meta_info.get("spec_cap_lens_histogram")
    if PROPOSED not in meta_info or not lengths:
        return
    steps = meta_info["spec_verify_ct"]
    gamma = meta_info[PROPOSED] // steps
    drafts = (steps - sum(lengths)) * gamma + sum(w * n for w, n in enumerate(lengths[1:]))
    meta_info[PROPOSED] = drafts
    if drafts:
        meta_info[RATE] = meta_info["spec_num_correct_drafts"] / drafts
    else:
        del meta_info[PROPOSED], meta_info[RATE]
