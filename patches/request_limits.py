"""Refuses what would end the scheduler or starve everyone, before it gets there.

The hooks: `sglang_dspark/serving/request_limits.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving import request_limits

_MANAGER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"

SEAMS = (
    Seam(
        name="request-answers",
        target=f"{_MANAGER}.generate_request",
        kind="before",
        hook=request_limits.check_answers,
        signature="(self, obj, request=None)",
        why="upstream makes a request of every answer asked for, however many",
    ),
    Seam(
        name="request-values",
        target=f"{_MANAGER}._validate_one_request",
        kind="before",
        hook=request_limits.check_request,
        signature="(self, obj, input_ids)",
        why="values that upstream does not check raise in the scheduler, which ends the server",
    ),
)
