"""Record the outcome of every request of a cell: exact times, nothing dropped.

One `Record` per scheduled request, failed and never-sent ones included; `records_file` saves them
to disk.

Inter-token latency (ITL): a chunk of n tokens that arrives g seconds after the last one counts as n
intervals of g / n. Counted as one interval it would make every speculating server look slow between
tokens; with n - 1 zeros it would make the median far too fast. TPOT is the mean of these intervals.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from sglang_dspark.loadtest.client.metrics import SpecStats

Outcome = Literal[
    "ok",
    "http",  # the server answered with status 4xx or 5xx
    "connection",  # no connection, or it broke before the answer began
    "cut",  # the stream ended before its end mark, or without a finish reason
    "timeout",  # longer silence than the plan allows
    "error",  # the server reported an error, or aborted, within the stream
    "malformed",  # an event that is not JSON or lacks a required field, or no count of tokens
    "empty",  # a complete answer without a single token
    "unsent",  # the cell ended before it was sent
    "aborted",  # by the client's own `/abort_request`, as its plan says
    "left",  # the client closed the connection, as its plan says
]
INTENDED: tuple[Outcome, ...] = ("aborted", "left")  # neither answered nor failed


@dataclass(frozen=True)
class Record:
    """One request. Times in seconds from the cell's start on the client's monotonic clock.

    scheduled: when it was due, None in a closed loop; sent: when it was sent, None if never;
    at[i], tokens[i]: arrival and number of tokens of chunk i; status: HTTP, 0 without one;
    ended: when the outcome was known; asked: most tokens that the request allowed, 0 if unknown;
    loops: whether the text ends in repetitions of one short piece.
    """

    index: int
    prompt: str
    domain: str
    outcome: Outcome
    scheduled: float | None
    sent: float | None
    ended: float | None
    at: tuple[float, ...] = ()
    tokens: tuple[int, ...] = ()
    prompt_tokens: int = 0
    status: int = 0
    finish_reason: str = ""
    error: str = ""
    spec: SpecStats | None = None
    asked: int = 0
    loops: bool = False

    @property
    def ok(self) -> bool:
        """Return whether the answer is complete."""
        return self.outcome == "ok"

    @property
    def due(self) -> float:
        """Return the start of latency: the scheduled time, or in a closed loop the send time."""
        begin = self.sent if self.scheduled is None else self.scheduled
        if begin is None:
            raise ValueError(f"request {self.index} was never sent")
        return begin

    @property
    def ttft(self) -> float:
        """Return seconds from the due time to the first token, waiting in the client included."""
        return self.at[0] - self.due

    @property
    def seconds(self) -> float:
        """Return seconds from the due time to the last token."""
        return self.at[-1] - self.due

    @property
    def total_tokens(self) -> int:
        """Count the output tokens received."""
        return sum(self.tokens)

    @property
    def decode_tokens(self) -> int:
        """Count the tokens after the first chunk."""
        return self.total_tokens - self.tokens[0]

    @property
    def tpot(self) -> float:
        """Return mean seconds per token after the first chunk; NaN for an answer of one chunk."""
        if self.decode_tokens == 0:
            return float("nan")
        return (self.at[-1] - self.at[0]) / self.decode_tokens

    @property
    def tokens_per_s(self) -> float:
        """Return the user's tokens/s after the first chunk; NaN if no time passed."""
        tpot = self.tpot
        return 1 / tpot if tpot > 0 else float("nan")

    def itl(self) -> list[float]:
        """Return inter-token latencies, s, one per decoded token, a chunk's time spread evenly."""
        gaps: list[float] = []
        carried = 0.0
        for (last, now), count in zip(pairwise(self.at), self.tokens[1:], strict=True):
            carried += now - last
            if count:  # the time of a chunk without a new token counts for the next
                gaps += [carried / count] * count
                carried = 0.0
        return gaps


@dataclass(frozen=True)
class Header:
    """Header of one file: the process that wrote it and the lag of its timer.

    began_unix: the cell's start, seconds since 1970, to align the files of several workers;
    lag_ms: overshoot of the client's own timer, percentiles "p50", "p99" and "max".
    """

    worker: int
    workers: int
    began_unix: float
    fingerprint: str
    lag_ms: dict[str, float]
