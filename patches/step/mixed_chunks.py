"""`--enable-mixed-chunk` is off under DSPARK: a mixed step's tokens would ignore penalties.

Upstream (sglang/srt/managers/schedule_batch.py, `mix_with_running`) lets running requests
decode one token beside a chunk of a long prompt, by SGLang's sampler and its counts of output
tokens. DSPARK's steps leave these counts alone: penalties would see no token that was put out, and
`min_new_tokens` would forbid the end of an answer for ever.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import upstream

logger = logging.getLogger(__name__)


def leave_out(result: None, server_args: Any) -> None:
    """AFTER hook of `_handle_dspark`."""
    if upstream.resolving_view(server_args).enable_mixed_chunk:
        upstream.declare_resolution(server_args, "sglang-dspark", enable_mixed_chunk=False)
        logger.warning(
            "sglang-dspark: off: --enable-mixed-chunk: penalties and min_new_tokens would not hold "
            "in mixed steps of DSPARK"
        )


SEAMS = (
    Seam(
        name="mixed-chunks",
        target="sglang.srt.arg_groups.speculative_hook._handle_dspark",
        kind="after",
        hook=leave_out,
        signature="(server_args)",
        why="a mixed step draws tokens by counts of output tokens that DSPARK's steps do not keep",
    ),
)
