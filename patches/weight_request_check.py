"""Refuses a weight update from disk that would end the server or change nothing.

The hook: `sglang_dspark/serving/weight_request_check.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import weight_request_check

SEAMS = (
    Seam(
        name="weight-request-check",
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager.update_weights_from_disk",
        kind="around",
        hook=weight_request_check.update_from_disk,
        signature="(self, obj, request=None)",
        why="upstream ends for an unknown load_format, and reports success for another model",
    ),
)
