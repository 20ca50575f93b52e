"""Custom logit processors: a request that brings one is decoded a token a step.

SGLang (srt/speculative/dflash_utils.py) calls a processor for all rows of a window with one
`__req__`, whose output ends at the anchor: for the rows behind it that is another answer than plain
decoding shows. So such a request gets no drafts, a limit that is fixed before drafting. Where every
draft is verified there are no limits, and it is refused. SGLang's own
`DisallowedTokensLogitsProcessor` looks at nothing but the row, and keeps its drafts.

Under the overlap loop a processor may see the answer without its last token, as in plain decoding:
a step is launched before the one in front of it has been handed out.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sglang_dspark.common.files import brief
from sglang_dspark.schedule.budget import Counts
from sglang_dspark.serving import upstream
from sglang_dspark.step.state import state_of


def limits_of(reqs: list[Any], gamma: int) -> Counts | None:
    """Most drafts of each request (upstream's `Req`), [R] int64; None: nobody has a processor."""
    if not any(req.custom_logit_processor for req in reqs):
        return None
    return np.array([0 if reads_answer(req) else gamma for req in reqs], np.int64)


def reads_answer(req: Any) -> bool:
    """Whether the request's processor may look at more than the row that it is given."""
    if not req.custom_logit_processor:
        return False
    found = upstream.CustomLogitProcessor.from_str(req.custom_logit_processor)
    return type(found) is not upstream.DisallowedTokensLogitsProcessor


def check_processor(result: Any, scheduler: Any, req: Any) -> None:
    """AFTER hook of `init_req_max_new_tokens`, which every request comes through once: refuse a
    processor that cannot be loaded, which ends upstream's scheduler, and one that reads the answer
    where every draft is verified."""
    if not req.custom_logit_processor or req.to_finish:
        return
    try:
        reads = reads_answer(req)
    except Exception as error:  # loading it runs the client's code
        _refuse(req, f"it cannot be loaded ({type(error).__name__}: {brief(error)})")
        return
    if reads and scheduler.spec_algorithm.is_dspark() and state_of(scheduler.model_worker) is None:
        _refuse(
            req,
            "this server verifies every draft of DSPARK, for which a processor that reads the "
            "answer is not lossless; serve with schedule.mode auto, or without "
            "--speculative-algorithm",
        )


def _refuse(req: Any, why: str) -> None:
    req.custom_logit_processor = None  # upstream runs an aborted request's prompt all the same
    req.set_finish_with_abort(f"custom_logit_processor: {why}")
