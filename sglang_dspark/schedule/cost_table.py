"""Store profiled step times: of a pass over B tokens, and of a draft of d positions (paper, 3.2.3).

SPS(B) of the paper is 1 / seconds. With captured graphs the curve is a staircase: a batch costs as
much as the tier that it is padded to. So B is looked up at the next tier above, never at the probe
below. Without padding (CPU) seconds are linear between the measured points.

A table is valid for the machine, model and settings that it was timed on. Its key records them, and
`load` rejects a table with another key.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from sglang_dspark.common.atomic_write import replace_text
from sglang_dspark.common.files import brief, integer, load_json, number, reading
from sglang_dspark.errors import DSparkError
from sglang_dspark.paths import cache_root
from sglang_dspark.schedule.budget import Seconds

# 1 stored context by requests; 2 timed drafts with weights in the cache; 3 had no gamma in its key
FORMAT = 4
# No pass is faster than one read of memory, and no server can use passes of an hour: times outside
# these limits come from a broken file or clock.
LEAST_SECONDS, MOST_SECONDS = 1e-7, 3600.0
MOST_TOKENS = 1 << 24  # of a pass, and requests of a draft


@dataclass(frozen=True)
class ProfileKey:
    """Everything that a step time depends on besides the batch."""

    model: str  # with a digest of its config, as another model may have the same name
    drafter: str
    dtype: str
    device: str  # processor or GPU name, and usable cores or count
    parallel: str  # sizes: "tp1 pp1 dp1 ep1"
    backend: str  # attention backend, graphs or eager, verification mode
    versions: str  # sglang, torch, this package
    gamma: int  # drafts a request and step: the depths that are timed, and the windows

    def differences(self, other: ProfileKey) -> list[str]:
        """List `field: ours, not theirs` for each field that differs."""
        ours, theirs = asdict(self), asdict(other)
        return [f"{k}: {ours[k]!r}, not {theirs[k]!r}" for k in ours if ours[k] != theirs[k]]


@dataclass(frozen=True)
class CostTable:
    """Measured seconds; `tokens_curve` and `draft_row` interpolate them.

    knots: B, ascending; seconds: of a pass over that many tokens, at least LEAST_SECONDS. padded:
    knots are the tiers that batches are padded to. per_request: seconds that a request adds;
    per_context: seconds that a token of context adds for each row that sees it; `seconds` exclude
    both. draft_requests: R, ascending; draft_seconds[i][d]: drafting d positions for R requests.
    Column 0 is the cost of a step without drafting beyond a pass over R tokens (may be negative).
    """

    key: ProfileKey
    knots: tuple[int, ...]
    seconds: tuple[float, ...]
    padded: bool
    per_request: float
    per_context: float
    draft_requests: tuple[int, ...]
    draft_seconds: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        _ascending("knots", self.knots)
        _ascending("draft_requests", self.draft_requests)
        if len(self.seconds) != len(self.knots):
            raise ValueError(f"{len(self.seconds)} seconds for {len(self.knots)} knots")
        if len(self.draft_seconds) != len(self.draft_requests):
            raise ValueError("draft_seconds needs one row for each of draft_requests")
        if len({len(row) for row in self.draft_seconds}) != 1 or len(self.draft_seconds[0]) < 2:
            raise ValueError("draft_seconds rows must be gamma + 1 long, gamma >= 1")
        if self.key.gamma != self.gamma:
            raise ValueError(f"drafts of {self.gamma} for gamma {self.key.gamma}")
        for seconds in self.seconds:
            number(seconds, LEAST_SECONDS, MOST_SECONDS)
        for seconds in (self.per_request, self.per_context):
            number(seconds, 0.0, MOST_SECONDS)
        for row in self.draft_seconds:
            number(row[0], -0.9 * min(self.seconds), MOST_SECONDS)  # a step's total is above 0
            for seconds in row[1:]:
                number(seconds, 0.0, MOST_SECONDS)

    @property
    def gamma(self) -> int:
        """Return the depth of the deepest draft that was timed."""
        return len(self.draft_seconds[0]) - 1


def _ascending(name: str, values: tuple[int, ...]) -> None:
    if not values or values[0] < 1 or any(b <= a for a, b in pairwise(values)):
        raise ValueError(f"{name} must be ascending and >= 1: {list(values)}")


def monotone(values: Seconds, weights: Seconds | None = None) -> Seconds:
    """Return the nearest non-decreasing sequence (least squares; pool adjacent violators)."""
    pools: list[list[float]] = []  # [mean, weight, length]
    for i, value in enumerate(values):
        pools.append([float(value), 1.0 if weights is None else float(weights[i]), 1.0])
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            last, previous = pools.pop(), pools[-1]
            total = previous[1] + last[1]
            previous[0] = (previous[0] * previous[1] + last[0] * last[1]) / total
            previous[1], previous[2] = total, previous[2] + last[2]
    return np.repeat([p[0] for p in pools], [int(p[2]) for p in pools]).astype(np.float64)


def tokens_curve(
    knots: tuple[int, ...], seconds: Seconds, padded: bool, max_tokens: int
) -> Seconds:
    """Return the seconds of a pass over B = 0 .. max_tokens tokens: [max_tokens + 1] float64.

    seconds: [knots]. Padded: B costs as much as the first knot >= B. Otherwise the curve is linear
    between knots, and flat below the first. Above the last knot (no tier holds the batch) both
    curves rise with the average slope of the upper half of the knots.
    """
    at = np.asarray(knots)
    batch = np.arange(max_tokens + 1)
    if padded:
        index = np.searchsorted(at, batch, side="left")
        curve = seconds[np.minimum(index, len(at) - 1)].astype(np.float64)
    else:
        curve = np.interp(batch, at, seconds)
    beyond = batch > at[-1]
    if beyond.any() and len(at) > 1:
        half = len(at) // 2 if len(at) > 2 else 0
        rise = seconds if padded else monotone(seconds)  # more rows may be faster
        slope = max(0.0, (rise[-1] - rise[half]) / (at[-1] - at[half]))
        curve[beyond] = seconds[-1] + slope * (batch[beyond] - at[-1])
    return curve


def draft_row(table: CostTable, requests: int) -> Seconds:
    """Return seconds of drafting 0 .. gamma positions, [gamma + 1], interpolated over R."""
    rows = np.asarray(table.draft_seconds)  # [points, gamma + 1]
    return np.array([np.interp(requests, table.draft_requests, column) for column in rows.T])


def cache_path(key: ProfileKey) -> Path:
    """Return the path of the table of this key."""
    digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:16]
    return cache_root() / "sglang-dspark" / "costs" / f"{digest}.json"


def save(table: CostTable, path: Path) -> None:
    """Write the table as JSON, atomically. Raises DSparkError if it cannot be written."""
    text = json.dumps({"format": FORMAT, **asdict(table)}, indent=1, allow_nan=False)
    replace_text(path, text + "\n", "step times")


def load(path: Path, key: ProfileKey) -> CostTable:
    """Read a table and check that its key is the given one.

    Raises DSparkError if the file cannot be read, is not a table, or has another key.
    """
    with reading(path, "table of step times", "a new measurement replaces it"):
        table = from_document(load_json(path))
    different = table.key.differences(key)
    if different:
        raise DSparkError(
            f"{path} was measured elsewhere ({brief('; '.join(different))}); "
            "a new measurement replaces it"
        )
    return table


def from_document(document: Any) -> CostTable:
    """Parse the JSON document of `save`. Raises one of `files.FAULTS` on any other document."""
    if document["format"] != FORMAT:
        raise ValueError("another format")
    if set(document) - {"format"} != {field.name for field in fields(CostTable)}:
        raise ValueError("unknown or missing fields")
    return CostTable(
        key=ProfileKey(**document["key"]),
        knots=tuple(integer(k, 1, MOST_TOKENS) for k in document["knots"]),
        seconds=_floats(document["seconds"]),
        padded=_boolean(document["padded"]),
        per_request=_float(document["per_request"]),
        per_context=_float(document["per_context"]),
        draft_requests=tuple(integer(r, 1, MOST_TOKENS) for r in document["draft_requests"]),
        draft_seconds=tuple(_floats(row) for row in document["draft_seconds"]),
    )


def _float(value: object) -> float:
    """Parse a number; `CostTable` checks the bounds of each field."""
    return number(value, -MOST_SECONDS, MOST_SECONDS)


def _floats(values: Any) -> tuple[float, ...]:
    return tuple(_float(value) for value in values)


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("padded is neither true nor false")
    return value
