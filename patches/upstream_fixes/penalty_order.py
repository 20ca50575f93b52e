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
    """Sort by name (BEFORE hook of the orchestrator's `__init__`).

    That is the order of `verify/penalties.py`: frequency and presence are subtracted before the
    factor of the repetition. The -inf of min_new_tokens does not depend on its place.
    """
    return (self, vocab_size, batch, sorted(penalizers, key=lambda each: each.__name__)), {}
