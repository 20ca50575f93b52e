"""Read acceptance counts from a server's answers.

The `meta_info` of SGLang has `spec_verify_ct`, `spec_num_proposed_drafts`,
`spec_correct_drafts_histogram` and `completion_tokens`: all inputs of `statistics.acceptance`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.statistics import RequestCounts


@dataclass(frozen=True)
class ServedGeneration:
    """One served request: output tokens and its acceptance counts."""

    tokens: tuple[int, ...]
    counts: RequestCounts


def counts_from_meta(meta: Mapping[str, Any], url: str) -> RequestCounts:
    """Return the acceptance counts of one answer's `meta_info`.

    An answer that the prefill finished has no verify steps: an empty histogram. Raises
    DSparkError if the server does not speculate or the counts contradict each other.
    """
    completion = int(meta["completion_tokens"])
    if "spec_verify_ct" not in meta:
        if completion > 1:
            raise DSparkError(
                f"the server at {url} does not speculate (no spec_verify_ct in meta_info): start "
                "it with --speculative-algorithm DSPARK"
            )
        return RequestCounts(completion, ())
    steps = int(meta["spec_verify_ct"])
    # A server that schedules proposes fewer than gamma a step: the histogram may be longer.
    gamma = int(meta.get("spec_num_proposed_drafts", 0)) // steps
    histogram = list(meta.get("spec_correct_drafts_histogram") or ())
    histogram += [0] * (gamma + 1 - len(histogram))
    counts = RequestCounts(completion, tuple(histogram))
    if counts.steps != steps or counts.accepted != int(meta["spec_num_correct_drafts"]):
        raise DSparkError(
            f"the server at {url} contradicts itself: {steps} verify steps and "
            f"{meta['spec_num_correct_drafts']} accepted drafts, histogram {histogram}"
        )
    return counts


def with_one_gamma(answers: Sequence[ServedGeneration]) -> list[ServedGeneration]:
    """Pad all histograms to one width: on a server that schedules they may differ."""
    width = max(len(answer.counts.histogram) for answer in answers)

    def padded(counts: RequestCounts) -> RequestCounts:
        missing = (0,) * (width - len(counts.histogram))
        return RequestCounts(counts.completion_tokens, counts.histogram + missing)

    return [ServedGeneration(each.tokens, padded(each.counts)) for each in answers]
