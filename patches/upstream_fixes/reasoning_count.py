"""Count an answer's reasoning tokens when its end is known, so that no dropped token is counted.

Upstream (sglang/srt/managers/scheduler_components/batch_result_processor.py) counts the
tokens of a step before `update_finish_state` finds the answer's end among them. With several tokens
a step `reasoning_tokens` exceeds `completion_tokens`, by as many as the step has behind the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.patches.seam import Seam

_PENDING = "_dspark_uncounted"  # on a `Req`: the step's tokens that are not counted yet


def defer(original: Callable[..., None], self: Any, req: Any, next_token_id: Any) -> None:
    """AROUND hook of `_maybe_update_reasoning_tokens`: keep a step's list for `count_kept`.

    next_token_id: a step's tokens, or the one token of a prefill, which is counted at once.
    """
    if isinstance(next_token_id, list):
        setattr(req, _PENDING, next_token_id)
    else:
        original(self, req, next_token_id)


def count_kept(self: Any, req: Any, *given: Any, **named: Any) -> None:
    """BEFORE hook of `_handle_finish_state_updated_req`: count the tokens up to the answer's end.

    It runs before the request is released, which reads the count (`--strip-thinking-cache`).
    """
    tokens = req.__dict__.pop(_PENDING, ())
    dropped = len(req.output_ids) - len(req.output_ids_through_stop)
    for token in tokens[: max(0, len(tokens) - dropped)]:
        self._maybe_update_reasoning_tokens(req, token)


_PROCESSOR = (
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
)
_WHY = (
    "upstream counts a step's reasoning tokens before it drops those behind the end, so they "
    "exceed the completion tokens (sglang#39826)"
)
_ISSUE = "sgl-project/sglang#39826"
_DROP_WHEN = "upstream counts reasoning tokens after it knows where the answer ends"

SEAMS = (
    Seam(
        name="reasoning-defer",
        target=f"{_PROCESSOR}._maybe_update_reasoning_tokens",
        kind="around",
        hook=defer,
        signature="(self, req, next_token_id)",
        why=_WHY,
        issue=_ISSUE,
        drop_when=_DROP_WHEN,
    ),
    Seam(
        name="reasoning-count",
        target=f"{_PROCESSOR}._handle_finish_state_updated_req",
        kind="before",
        hook=count_kept,
        signature="(self, req, batch, result, i, logits_output)",
        why=_WHY,
        issue=_ISSUE,
        drop_when=_DROP_WHEN,
    ),
)
