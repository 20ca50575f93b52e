"""Count an answer's reasoning tokens when its end is known, so that no dropped token is counted.

Upstream (sglang/srt/managers/scheduler_components/batch_result_processor.py) counts the
tokens of a step before `update_finish_state` finds the answer's end among them. With several tokens
a step `reasoning_tokens` exceeds `completion_tokens` by the number of the step's tokens after it.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.patches.seam import Seams, Upstream

SEAMS = Seams()
_PENDING = "_dspark_uncounted"  # on a `Req`: the step's tokens that are not counted yet


@SEAMS.subclass(
    "reasoning-count",
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor",
    why="upstream counts a step's reasoning tokens before it drops those behind the end, so "
    "they exceed the completion tokens (sglang#39826)",
    issue="sgl-project/sglang#39826",
    drop_when="upstream counts reasoning tokens after it knows where the answer ends",
)
class ResultProcessor(Upstream):
    """Upstream's processor of results, which counts reasoning tokens once the end is known."""

    def _maybe_update_reasoning_tokens(self, req: Any, next_token_id: Any) -> None:
        """Keep a step's list of tokens; count the one token of a prefill at once."""
        if isinstance(next_token_id, list):
            setattr(req, _PENDING, next_token_id)
        else:
            super()._maybe_update_reasoning_tokens(req, next_token_id)

    def _handle_finish_state_updated_req(
        self, req: Any, batch: Any, result: Any, i: int, logits_output: Any
    ) -> Any:
        """Count the tokens up to the end before the release reads it (--strip-thinking-cache)."""
        tokens = req.__dict__.pop(_PENDING, ())
        dropped = len(req.output_ids) - len(req.output_ids_through_stop)
        for token in tokens[: max(0, len(tokens) - dropped)]:
            super()._maybe_update_reasoning_tokens(req, token)
        return super()._handle_finish_state_updated_req(req, batch, result, i, logits_output)
