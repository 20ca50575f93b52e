"""Count only verified drafts in acceptance rates, not gamma for every step.

Upstream (sglang/srt/managers/tokenizer_manager.py) computes `spec_num_proposed_drafts` as
steps times gamma. Under confidence scheduling a step verifies fewer, or none; the acceptance rate
of a request without drafts is then 0. `spec_cap_lens_histogram` has the verified tokens. The log
and the gauge `sglang:spec_accept_rate` (managers/scheduler_components/metrics_reporter.py) count in
the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.patches.seam import Seams
from sglang_dspark.serving import upstream

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


@SEAMS.around(
    "drafted-rate",
    "sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter."
    "report_decode_stats",
    signature="(self, can_run_cuda_graph, running_batch=None, num_generated_tokens=0)",
    why="upstream's rate counts gamma drafts a step, also where scheduling verified fewer or none",
)
def report_drafted(original: Callable[..., None], reporter: Any, *given: Any, **named: Any) -> None:
    """Report accepted over verified drafts (AROUND hook of `report_decode_stats`).

    Upstream divides accepted drafts by steps times gamma, then resets its counters; most calls
    report nothing.
    """
    accepted, steps = reporter.spec_num_correct_drafts, reporter.spec_num_forward_ct
    drafted = reporter.spec_num_cap_tokens - steps  # a step verifies its anchor and its drafts
    if drafted > 0:
        gamma = int(upstream.get_spec().speculative_num_draft_tokens) - 1
        reporter.spec_num_correct_drafts = accepted * steps * gamma / drafted
    original(reporter, *given, **named)
    if reporter.spec_num_forward_ct == steps:
        reporter.spec_num_correct_drafts = accepted
