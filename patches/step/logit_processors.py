"""Refuse custom logit processors that cannot be loaded, or where every draft is verified.

SGLang (srt/speculative/dflash_utils.py) calls a processor for all rows of a window with one
`__req__`, whose output ends at the anchor: for later rows plain decoding has another result. So a
request with a processor that reads the answer gets no drafts (`step/rules.py`). Where every draft
is verified such a request is refused.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.common.files import brief
from sglang_dspark.patches.seam import Seams
from sglang_dspark.step.rules import reads_answer
from sglang_dspark.step.state import state_of

SEAMS = Seams()


@SEAMS.after(
    "logit-processors",
    "sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens",
    signature="(self, req)",
    why="a processor that reads the output sees that of the anchor in every row of a window",
)
def check_processor(result: Any, scheduler: Any, req: Any) -> None:
    """AFTER hook of `init_req_max_new_tokens`, which is called once for every request.

    Refuse a processor that cannot be loaded, which would end upstream's scheduler, and one that
    reads the answer where every draft is verified.
    """
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
