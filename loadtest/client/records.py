"""Record the outcome of every request of a cell: exact times, nothing dropped.

One `Record` per scheduled request, failed and never-sent ones included; `records_file` keeps them
on disk.

Inter-token latency (ITL): a chunk of n tokens that comes g seconds after the one before stands for
n intervals of g / n. Counting it as one interval would make every speculating server look slow
between tokens, counting n - 1 zeros would make its median absurdly fast. TPOT is the mean of these.
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
    "malformed",  # an event that is no JSON or lacks what it must have, or no count of tokens
    "empty",  # a complete answer without a single token
    "unsent",  # the cell ended before its turn came
    "aborted",  # by the client's own `/abort_request`, as its plan says
    "left",  # the client closed the connection, as its plan says
]
INTENDED: tuple[Outcome, ...] = ("aborted", "left")  # neither answered nor failed


@dataclass(frozen=True)
class Record:
    """One request. Times in seconds from the cell's start on the client's monotonic clock.

    scheduled: when it was due, None in a closed loop; sent: when it really left, None if it never
    did; at[i], tokens[i]: arrival and number of tokens of chunk i; status: HTTP, 0 without one;
    ended: when the outcome was known; asked: most tokens that the request allowed, 0 if unknown;
    loops: the text ends in one short piece again and again.
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
        """Due to first token, s; time spent waiting in the client counts."""
        return self.at[0] - self.due

    @property
    def seconds(self) -> float:
        """Due to last token, s."""
        return self.at[-1] - self.due

    @property
    def total_tokens(self) -> int:
        """Output tokens received."""
        return sum(self.tokens)

    @property
    def decode_tokens(self) -> int:
        """Tokens that came after the first chunk."""
        return self.total_tokens - self.tokens[0]

    @property
    def tpot(self) -> float:
        """Mean seconds per token after the first chunk; NaN for an answer of one chunk."""
        if self.decode_tokens == 0:
            return float("nan")
        return (self.at[-1] - self.at[0]) / self.decode_tokens

    @property
    def tokens_per_s(self) -> float:
        """Speed this user saw after the first chunk; NaN where no time passed."""
        tpot = self.tpot
        return 1 / tpot if tpot > 0 else float("nan")

    def itl(self) -> list[float]:
        """Inter-token latencies in s, one a decoded token, chunks of several spread evenly."""
        gaps: list[float] = []
        carried = 0.0
        for (last, now), count in zip(pairwise(self.at), self.tokens[1:], strict=True):
            carried += now - last
            if count:  # a chunk of text without a new token hands its time on
                gaps += [carried / count] * count
                carried = 0.0
        return gaps


@dataclass(frozen=True)
class Header:
    """Of one file: the process that wrote it and how well it kept time.

    began_unix: the cell's start, seconds since 1970, to lay the files of several workers together;
    lag_ms: overshoot of the client's own timer, percentiles "p50", "p99" and "max".
    """

    worker: int
    workers: int
    began_unix: float
    fingerprint: str
    lag_ms: dict[str, float]
