"""What became of every request of a cell: exact times, kept on disk, nothing dropped.

One `Record` per scheduled request, failed and never-sent ones included. A file is JSON lines
compressed with zstandard: a header (who, when, the client's own lag), then a record a line. It is
written whole and renamed into place, so a file that exists is complete.

Inter-token latency (ITL): a chunk of n tokens that comes g seconds after the one before stands for
n intervals of g / n. Counting it as one interval would make every speculating server look slow
between tokens, counting n - 1 zeros would make its median absurdly fast. TPOT is the mean of these.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import zstandard

from sglang_dspark.errors import DSparkError
from sglang_dspark.loadtest.metrics import SpecStats

FORMAT = "dspark-load-records"
VERSION = 1

Outcome = Literal[
    "ok",
    "http",  # the server answered with status 4xx or 5xx
    "connection",  # no connection, or it broke before the answer began
    "cut",  # the stream ended before its end mark
    "timeout",  # longer silence than the plan allows
    "error",  # the server reported an error, or aborted, within the stream
    "malformed",  # an event that is no JSON or lacks what it must have
    "empty",  # a complete answer without a single token
    "unsent",  # the cell ended before its turn came
]


@dataclass(frozen=True)
class Record:
    """One request. Times in seconds from the cell's start on the client's monotonic clock.

    scheduled: when it was due, None in a closed loop; sent: when it really left, None if it never
    did; at[i], tokens[i]: arrival and number of tokens of chunk i; status: HTTP, 0 without one;
    ended: when the outcome was known.
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

    @property
    def ok(self) -> bool:
        """Whether the answer came whole."""
        return self.outcome == "ok"

    @property
    def due(self) -> float:
        """Where latency begins: the scheduled time, in a closed loop the sending."""
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


def write_records(path: Path, header: Header, records: Sequence[Record]) -> None:
    """Write a file atomically. Raises DSparkError when the place cannot be written."""
    head = {"format": FORMAT, "version": VERSION, **asdict(header)}
    lines = [json.dumps(head), *(json.dumps(asdict(record)) for record in records)]
    data = zstandard.ZstdCompressor(level=6).compress(("\n".join(lines) + "\n").encode())
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        raise DSparkError(f"cannot write records to {path}: {error.strerror}") from error


def read_records(path: Path) -> tuple[Header, list[Record]]:
    """Read one file. Raises DSparkError when it is not a whole file of this version."""
    try:
        with path.open("rb") as file, zstandard.ZstdDecompressor().stream_reader(file) as raw:
            rows = [json.loads(line) for line in io.TextIOWrapper(raw, encoding="utf-8")]
        head = rows.pop(0)
        if (head.pop("format"), head.pop("version")) != (FORMAT, VERSION):
            raise DSparkError(f"{path} was written by another version; measure the cell again")
        return Header(**head), [_record(row) for row in rows]
    except OSError as error:
        raise DSparkError(f"cannot read records from {path}: {error.strerror}") from None
    except (zstandard.ZstdError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise DSparkError(f"{path} is not a file of load records ({error})") from None


def _record(row: dict[str, Any]) -> Record:
    spec = row["spec"]
    if spec is not None:
        row["spec"] = SpecStats(**{**spec, "histogram": tuple(spec["histogram"])})
    sequences = {"at": tuple(row["at"]), "tokens": tuple(row["tokens"])}
    return Record(**{field.name: row[field.name] for field in fields(Record)} | sequences)
