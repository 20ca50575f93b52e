"""Refuses what would raise in the scheduler, before it gets there: one request, one error.

Upstream: sglang/srt/managers/tokenizer_manager.py, `TokenizerManager._validate_one_request`
(0.5.23) checks lengths only. On a CPU the embedding of a token id outside the vocabulary raises in
the scheduler, which ends the server; a speed target that is no number would do the same in ours.
"""

from __future__ import annotations

from typing import Any


def check_request(self: Any, obj: Any, input_ids: list[int] | None) -> None:
    """BEFORE hook; upstream answers ValueError with status 400."""
    _check_speed(obj)
    if not input_ids:
        return
    size = self.model_config.vocab_size
    lowest, highest = min(input_ids), max(input_ids)
    if lowest < 0 or highest >= size:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"input_ids contain token {wrong}; valid ids are 0 to {size - 1}")


def _check_speed(obj: Any) -> None:
    """Raise ValueError if the request's speed target (serving/schedule/speed.py) is no number."""
    sampling = getattr(obj, "sampling_params", None)
    if isinstance(sampling, dict) and sampling.get("custom_params"):
        from sglang_dspark.serving.schedule.speed import target_of

        target_of(sampling["custom_params"])
