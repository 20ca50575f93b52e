"""Disable `--enable-mixed-chunk` under DSPARK: a mixed step's tokens would ignore penalties.

Upstream (sglang/srt/managers/schedule_batch.py, `mix_with_running`) lets running requests decode
one token in the batch of a prompt's chunk, by SGLang's sampler and its counts of output tokens.
DSPARK's steps do not update these counts: penalties would see no output token, and
`min_new_tokens` would forbid EOS for ever.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_dspark.patches.seam import Seams
from sglang_dspark.serving import upstream

SEAMS = Seams()
logger = logging.getLogger(__name__)


@SEAMS.after(
    "mixed-chunks",
    "sglang.srt.arg_groups.speculative_hook._handle_dspark",
    why="a mixed step draws tokens by counts of output tokens that DSPARK's steps do not keep",
)
def disable_mixed_chunk(result: None, server_args: Any) -> None:
    """AFTER hook of `_handle_dspark`: turn the argument off, and log it."""
    if upstream.resolving_view(server_args).enable_mixed_chunk:
        upstream.declare_resolution(server_args, "sglang-dspark", enable_mixed_chunk=False)
        logger.warning(
            "sglang-dspark: off: --enable-mixed-chunk: penalties and min_new_tokens would not hold "
            "in mixed steps of DSPARK"
        )
