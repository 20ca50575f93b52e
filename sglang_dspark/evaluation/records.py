"""Define the reference engine's records: one per verify step, one per finished request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Step:
    """One verify step of one request.

    position: position of the anchor in the sequence. drafted: the gamma drafted tokens.
    verify_len: l_r, drafts admitted to the verify window. accepted: leading drafts accepted,
    at most verify_len. kept: tokens that the request received, accepted + 1 unless a stop token or
    the token limit cut the step. confidence: c_k of each draft, not calibrated; empty for
    drafters without a confidence.
    """

    position: int
    drafted: tuple[int, ...]
    verify_len: int
    accepted: int
    kept: int
    confidence: tuple[float, ...]

    def __post_init__(self) -> None:
        assert 0 <= self.accepted <= self.verify_len <= len(self.drafted)
        assert 1 <= self.kept <= self.accepted + 1
        assert len(self.confidence) in (0, len(self.drafted))


@dataclass(frozen=True)
class Generation:
    """A finished request: output `tokens` (a stop token included) and its verify steps in order.

    The first token comes from the prefill and belongs to no step.
    """

    prompt_tokens: int
    tokens: tuple[int, ...]
    finish: Literal["stop", "length"]
    steps: tuple[Step, ...]

    def __post_init__(self) -> None:
        assert len(self.tokens) == 1 + sum(step.kept for step in self.steps)
