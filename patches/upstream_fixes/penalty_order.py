"""Apply SGLang's penalties in one order in every process: the order of DSPARK's penalties.

Upstream (sglang/srt/sampling/sampling_batch_info.py) passes a set of classes to
`BatchedPenalizerOrchestrator`, which applies them in the set's order. Classes hash by address, so
that order differs from process to process, and `logit * factor` does not commute with
`logit - penalty`: a plain server's answers differ from those of the next, and from DSPARK's.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.patches.seam import Seams

SEAMS = Seams()
# Subtractions first, then the factor (`verify/penalties.py`), then -inf of min_new_tokens.
ORDER = (
    "BatchedFrequencyPenalizer",
    "BatchedPresencePenalizer",
    "BatchedRepetitionPenalizer",
    "BatchedMinNewTokensPenalizer",
)


@SEAMS.before(
    "penalty-order",
    "sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.__init__",
    why="upstream applies a set of penalties in its order, which differs between processes",
    issue="none found (2026-11-27)",
    drop_when="upstream passes its penalty classes in a list or tuple, not in a set",
)
def sort_penalizers(
    self: Any, vocab_size: int, batch: Any, penalizers: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Sort by `ORDER`, other classes last (BEFORE hook of the orchestrator's `__init__`)."""
    rank = {name: place for place, name in enumerate(ORDER)}
    ordered = sorted(
        penalizers, key=lambda each: (rank.get(each.__name__, len(rank)), each.__name__)
    )
    return (self, vocab_size, batch, ordered), {}
