"""Refuse, or switch off, features that DSPARK's steps cannot serve without changing answers.

Custom logit processors: SGLang (srt/speculative/dflash_utils.py) calls one for all rows of a window
with one `__req__`, whose output ends at the anchor: for later rows plain decoding has another
result. So a request with a processor that reads the answer gets no drafts (`step/rules.py`). Where
every draft is verified such a request is refused.

`--enable-mixed-chunk` (sglang/srt/managers/schedule_batch.py, `mix_with_running`) lets running
requests decode one token in the batch of a prompt's chunk, by SGLang's sampler and its counts of
output tokens. DSPARK's steps do not update these counts: penalties would see no output token, and
`min_new_tokens` would always forbid EOS.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_dspark.common.files import brief
from sglang_dspark.patches.seam import Seams
from sglang_dspark.serving import upstream
from sglang_dspark.step.rules import reads_answer
from sglang_dspark.step.state import state_of

SEAMS = Seams()
logger = logging.getLogger(__name__)


@SEAMS.after(
    "logit-processors",
    "sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens",
    signature="(self, req)",
    why="a processor that reads the output sees that of the anchor in every row of a window",
)
def check_processor(result: Any, scheduler: Any, req: Any) -> None:
    """Refuse a request's unusable processor (AFTER hook of `init_req_max_new_tokens`).

    SGLang calls it once for every request. Refused are a processor that cannot be loaded, which
    would end upstream's scheduler, and one that reads the answer where every draft is verified.
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
    req.custom_logit_processor = None  # upstream still runs an aborted request's prompt
    req.set_finish_with_abort(f"custom_logit_processor: {why}")


@SEAMS.after(
    "mixed-chunks",
    "sglang.srt.arg_groups.speculative_hook._handle_dspark",
    why="a mixed step draws tokens by counts of output tokens that DSPARK's steps do not keep",
)
def disable_mixed_chunk(result: None, server_args: Any) -> None:
    """Turn the argument off, and log it (AFTER hook of `_handle_dspark`)."""
    if upstream.resolving_view(server_args).enable_mixed_chunk:
        upstream.declare_resolution(server_args, "sglang-dspark", enable_mixed_chunk=False)
        logger.warning(
            "sglang-dspark: off: --enable-mixed-chunk: penalties and min_new_tokens would not hold "
            "in mixed steps of DSPARK"
        )
