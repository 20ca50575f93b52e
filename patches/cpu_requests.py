"""Refuses token ids outside the vocabulary, before they reach the scheduler.

Upstream: sglang/srt/managers/tokenizer_manager.py, `TokenizerManager._validate_one_request`
(0.5.23) checks lengths only. On a CPU the embedding of such an id raises in the scheduler, which
ends the server; here the one request gets an error.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.patches.seam import Seam


def check_token_ids(self: Any, obj: Any, input_ids: list[int] | None) -> None:
    """BEFORE hook; upstream answers ValueError with status 400."""
    if not input_ids:
        return
    size = self.model_config.vocab_size
    lowest, highest = min(input_ids), max(input_ids)
    if lowest < 0 or highest >= size:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"input_ids contain token {wrong}; valid ids are 0 to {size - 1}")


SEAMS = (
    Seam(
        name="cpu-token-range",
        target="sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        kind="before",
        hook=check_token_ids,
        signature="(self, obj, input_ids)",
        why="a token id outside the vocabulary ends the scheduler process on a CPU",
        device="cpu",
    ),
)
