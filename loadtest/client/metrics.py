"""Measure a served request: latency, speed per user, and the acceptance of drafts.

tau is the mean number of tokens a verify step yields, the bonus token included: 1 + accepted drafts
per step. It is computed from the server's counts, not from the output tokens, which include the
token of the prefill and are cut at a stop.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Chunk:
    """One streamed piece: seconds since the request was sent, text, number of tokens, their ids."""

    at: float
    text: str
    tokens: int
    ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class SpecStats:
    """The server's counts of one or more requests.

    steps: verify steps; accepted: accepted drafts in all of them;
    histogram[n]: steps that accepted exactly n drafts.
    """

    steps: int
    accepted: int
    histogram: tuple[int, ...]

    @classmethod
    def from_details(cls, details: Mapping[str, Any]) -> SpecStats:
        """Read `sglext.spec_tokens_details` or `meta_info` (SGLang 0.5.23)."""
        return cls(
            steps=int(details["spec_verify_ct"]),
            accepted=int(details["spec_num_correct_drafts"]),
            histogram=tuple(details.get("spec_correct_drafts_histogram") or ()),
        )

    @classmethod
    def total(cls, parts: Iterable[SpecStats]) -> SpecStats:
        """Sum over requests."""
        parts = list(parts)
        width = max((len(part.histogram) for part in parts), default=0)
        padded = [part.histogram + (0,) * (width - len(part.histogram)) for part in parts]
        return cls(
            steps=sum(part.steps for part in parts),
            accepted=sum(part.accepted for part in parts),
            histogram=tuple(sum(column) for column in zip(*padded, strict=True)),
        )

    @property
    def tau(self) -> float:
        """Return the tokens per verify step, bonus included; NaN without a step."""
        return 1.0 + self.accepted / self.steps if self.steps else float("nan")

    def acceptance(self, gamma: int) -> list[float]:
        """Return the share of steps whose first k drafts were all accepted, k = 1..gamma."""
        steps = sum(self.histogram)
        return [sum(self.histogram[k:]) / steps if steps else float("nan") for k in _upto(gamma)]


@dataclass(frozen=True)
class Completion:
    """A finished streamed request; times in seconds from sending it."""

    chunks: tuple[Chunk, ...]
    prompt_tokens: int
    finish_reason: str
    spec: SpecStats | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Return the text of the whole answer."""
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def ids(self) -> tuple[int, ...]:
        """Return the output token ids, empty if the interface does not send them."""
        return tuple(token for chunk in self.chunks for token in chunk.ids)

    @property
    def tokens(self) -> int:
        """Count the output tokens."""
        return sum(chunk.tokens for chunk in self.chunks)

    @property
    def ttft(self) -> float:
        """Return the time to first token, s."""
        return self.chunks[0].at

    @property
    def seconds(self) -> float:
        """Return the time to the last token, s."""
        return self.chunks[-1].at

    @property
    def decode_seconds(self) -> float:
        """Return the time from the first chunk to the last, s."""
        return self.seconds - self.ttft

    @property
    def decode_tokens(self) -> int:
        """Count the tokens after the first chunk."""
        return self.tokens - self.chunks[0].tokens

    @property
    def decode_steps(self) -> int:
        """Count the decode steps after the prefill: the server's count, else one per token."""
        return self.spec.steps if self.spec is not None else self.decode_tokens

    @property
    def tokens_per_s(self) -> float:
        """Return the user's tokens/s after the first token; NaN for an answer of one chunk."""
        if self.decode_seconds <= 0:
            return float("nan")
        return self.decode_tokens / self.decode_seconds

    def drafted(self) -> list[int]:
        """Count the leading tokens of each chunk that were accepted drafts: [chunks].

        The first chunk is the prefill's. Any other holds its step's accepted drafts and then the
        bonus token. A stop may occur at a draft, so the last chunk's share is computed from the
        server's total. All counts are 0 without speculation.
        """
        counts = [0] * len(self.chunks)
        if self.spec is None or len(self.chunks) < 2:
            return counts
        for i, chunk in enumerate(self.chunks[1:], start=1):
            counts[i] = chunk.tokens - 1
        last_accepted = self.spec.accepted - sum(counts[:-1])
        counts[-1] = max(0, min(last_accepted, self.chunks[-1].tokens))
        return counts


def per_user_speed(completions: Sequence[Completion]) -> float:
    """Return tokens/s per user: all decoded tokens over the sum of the users' decode times."""
    seconds = sum(c.decode_seconds for c in completions)
    return sum(c.decode_tokens for c in completions) / seconds if seconds > 0 else float("nan")


def step_ms(completions: Sequence[Completion]) -> float:
    """Return the milliseconds per decode step after the prefill, over all requests."""
    steps = sum(c.decode_steps for c in completions)
    seconds = sum(c.decode_seconds for c in completions)
    return 1e3 * seconds / steps if steps else float("nan")


def median(values: Sequence[float]) -> float:
    """Return the median; NaN for no values."""
    return statistics.median(values) if values else float("nan")


def _upto(gamma: int) -> range:
    return range(1, gamma + 1)
