"""Refuses what would raise in the scheduler, before it gets there: one request, one error.

The hooks: `sglang_dspark/serving/cpu/requests.py`.
"""

from __future__ import annotations

from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving.cpu import requests

SEAMS = (
    Seam(
        name="cpu-request-values",
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        kind="before",
        hook=requests.check_request,
        signature="(self, obj, input_ids)",
        why="an unknown token id or a speed target that is no number would end the scheduler",
        device="cpu",
    ),
)
