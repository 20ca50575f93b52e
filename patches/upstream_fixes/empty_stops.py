"""Ignore empty stop strings and stop patterns, which end every answer at its first token.

Upstream (sglang/srt/managers/schedule_batch.py) looks for each stop in the answer's end,
and "" is in every text (sglang#38712). Clients send it for "no stop"; OpenAI's API ignores it too.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.patches.seam import Seam


def drop_empty(self: Any, tokenizer: Any) -> None:
    """BEFORE hook of `SamplingParams.normalize`: drop the empty ones, for every API."""
    self.stop_strs = _without_empty(self.stop_strs)
    self.stop_regex_strs = _without_empty(self.stop_regex_strs)


def _without_empty(stops: str | list[str] | None) -> str | list[str] | None:
    return [each for each in stops if each] if isinstance(stops, list) else stops or None


SEAMS = (
    Seam(
        name="empty-stops",
        target="sglang.srt.sampling.sampling_params.SamplingParams.normalize",
        kind="before",
        hook=drop_empty,
        signature="(self, tokenizer)",
        why="upstream ends an answer with an empty stop string at its first token (sglang#38712)",
        issue="sgl-project/sglang#38712",
        drop_when="upstream ignores or refuses empty stop strings and patterns",
    ),
)
