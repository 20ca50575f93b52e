"""Read recorded loads in two published formats: arrival time and lengths of each request.

Mooncake: JSON lines with `timestamp` in ms, `input_length`, `output_length` and `hash_ids`, a
number for each block of 512 prompt tokens, the last one possibly partial; equal numbers are equal
blocks. BurstGPT: CSV, with `Timestamp` in s, `Request tokens` and `Response tokens` among its
columns. Both readers skip rows without an answer, which failed requests have.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TextIO

from sglang_dspark.common.files import FAULTS, brief, fault, integer, parse_json
from sglang_dspark.errors import DSparkError

BLOCK = 512  # prompt tokens per hash_id of Mooncake
TraceFormat = Literal["mooncake", "burstgpt"]
_TIME, _PROMPT, _ANSWER = "Timestamp", "Request tokens", "Response tokens"
_MOST_TOKENS = 1 << 24
_MOST_ID = 1 << 63


@dataclass(frozen=True)
class Traced:
    """One request. line: in the file, from 1; at: seconds; blocks: numbers of its prompt's blocks
    of `BLOCK` tokens in order, empty if the trace lacks them."""

    line: int
    at: float
    prompt_tokens: int
    answer_tokens: int
    blocks: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        """Count the tokens of prompt and answer."""
        return self.prompt_tokens + self.answer_tokens


@dataclass(frozen=True)
class RecordedLoad:
    """The requests of a trace, by time; at: from the first of them. left_out: skipped rows, without
    an answer or with too many tokens."""

    path: Path
    rows: tuple[Traced, ...]
    left_out: int

    @property
    def seconds(self) -> float:
        """Return the seconds from the first request to the last."""
        return self.rows[-1].at


def read_trace(
    path: Path, kind: TraceFormat, *, first: int | None = None, longest: int | None = None
) -> RecordedLoad:
    """Read the first `first` requests of a trace; skip those of more than `longest` tokens.

    Raises DSparkError naming file, line, the fault and its fix.
    """
    reader = _mooncake if kind == "mooncake" else _burstgpt
    rows: list[Traced] = []
    left_out = 0
    before = -math.inf
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for row in reader(path, file):
                if row.at < before:
                    raise _wrong(path, row.line, f"{row.at:g} s is before the line above", _SORT)
                before = row.at
                if row.answer_tokens == 0 or (longest is not None and row.tokens > longest):
                    left_out += 1
                else:
                    rows.append(row)
                if len(rows) == first:
                    break
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DSparkError(f"cannot read the trace {path}: {fault(error)}") from None
    if not rows:
        raise DSparkError(f"the trace {path} holds no request to send ({left_out} skipped)")
    start = rows[0].at
    return RecordedLoad(path, tuple(replace(row, at=row.at - start) for row in rows), left_out)


_SORT = "sort the file by time"
_ROW = 'write {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]}'
_COLUMNS = f"name the columns {_TIME}, {_PROMPT} and {_ANSWER} in the first line"
_CSV_ROW = f"write seconds under {_TIME} and whole numbers under {_PROMPT} and {_ANSWER}"


def _mooncake(path: Path, file: TextIO) -> Iterator[Traced]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
            prompt = integer(value["input_length"], 1, _MOST_TOKENS)
            blocks = tuple(integer(each, -_MOST_ID, _MOST_ID) for each in value["hash_ids"])
            answer = integer(value["output_length"], 0, _MOST_TOKENS)
            row = Traced(number, _milliseconds(value["timestamp"]), prompt, answer, blocks)
        except FAULTS as error:
            raise _wrong(path, number, fault(error), _ROW) from None
        wanted = -(-prompt // BLOCK)
        if len(blocks) != wanted:
            said = f"{len(blocks)} hash_ids for a prompt of {prompt} tokens"
            raise _wrong(path, number, said, f"give one for each {BLOCK} tokens begun: {wanted}")
        yield row


def _burstgpt(path: Path, file: TextIO) -> Iterator[Traced]:
    table = csv.DictReader(file)
    missing = [name for name in (_TIME, _PROMPT, _ANSWER) if name not in (table.fieldnames or ())]
    if missing:
        raise _wrong(path, 1, f"no column {', '.join(missing)}", _COLUMNS)
    for row in table:
        number = table.line_num
        try:
            at = _seconds(float(_text(row, _TIME)))
            answer = integer(int(_text(row, _ANSWER)), 0, _MOST_TOKENS)
            # A trace may give a failed request no token at all; it is skipped.
            prompt = integer(int(_text(row, _PROMPT)), min(answer, 1), _MOST_TOKENS)
        except FAULTS as error:
            raise _wrong(path, number, fault(error), _CSV_ROW) from None
        yield Traced(number, at, prompt, answer)


def _text(row: Mapping[str, str | None], name: str) -> str:
    value = row[name]
    if value is None:
        raise ValueError(f"no value under {name}")
    return value


def _milliseconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"timestamp is {brief(repr(value), 40)}, not a number")
    return _seconds(value / 1000)


def _seconds(value: float) -> float:
    if not math.isfinite(value) or value < 0:
        raise ValueError(f"{value} is no time")
    return value


def _wrong(path: Path, line: int, what: str, fix: str) -> DSparkError:
    return DSparkError(f"{path}:{line}: {what}; {fix}")
