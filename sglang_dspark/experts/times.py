"""Measured times of the experts' backends, from which `dispatch.Chooser` chooses.

A table belongs to the machine, layer shape, format and versions that it was measured with. They are
its key, and a table with another key is refused. A backend that fails, or whose result differs from
the torch reference, is excluded; the table holds the reason.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sglang_dspark.common.atomic_write import replace_text
from sglang_dspark.common.files import brief, integer, load_json, number, reading
from sglang_dspark.errors import DSparkError
from sglang_dspark.experts.backends import BACKENDS, Call, ExpertWeights, ExpertWorkload
from sglang_dspark.paths import cache_root

logger = logging.getLogger(__name__)


def _triton_errors() -> tuple[type[Exception], ...]:
    """Return the errors of a kernel that does not compile or exceeds the GPU's memory."""
    try:
        from triton.errors import TritonError
    except ImportError:
        return ()
    return (TritonError,)


FORMAT = 1
TOKENS = (1, 8, 64)
REPEATS = 5
_UNFIT = ("failed:", "its result differs")
LEAST_US, MOST_US = 1e-3, 3.6e9  # the clock's resolution; an hour for one layer is useless
MOST_TOKENS = 1 << 24
MOST_DIFFERENCE = 1e-2  # from the reference (`_difference`); with rows rounded to FP8 it is 1e-3
FAILURES: tuple[type[Exception], ...] = (
    *_triton_errors(),
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    ImportError,
    OSError,
)
_UNFITTING: tuple[type[Exception], ...] = (*FAILURES, DSparkError)


@dataclass(frozen=True)
class TimesKey:
    """Everything that the times depend on besides the number of tokens."""

    device: str
    format: str
    shape: str  # "8 experts of 576 x 512, top 2"
    dtype: str
    graph: bool
    versions: str

    @classmethod
    def of(cls, workload: ExpertWorkload, device: str, versions: str) -> TimesKey:
        """Build the key. device: name of the processor or GPU, and all else that sets its speed."""
        s = workload
        shape = f"{s.experts} experts of {s.width} x {s.inner}, top {s.top_k}"
        shape += f", {s.absent} elsewhere" if s.absent else ""
        return cls(device, s.format, shape, str(s.dtype).removeprefix("torch."), s.graph, versions)

    def differences(self, other: TimesKey) -> list[str]:
        """Return `field: ours, not theirs` for each field that differs."""
        ours, theirs = asdict(self), asdict(other)
        return [f"{k}: {ours[k]!r}, not {theirs[k]!r}" for k in ours if ours[k] != theirs[k]]


@dataclass(frozen=True)
class Timing:
    """Least time of a backend's call on a pass of this many tokens, microseconds."""

    tokens: int
    backend: str
    us: float

    def __post_init__(self) -> None:
        integer(self.tokens, 1, MOST_TOKENS)
        number(self.us, LEAST_US, MOST_US)
        if self.backend not in BACKENDS:
            raise ValueError(f"no backend {brief(repr(self.backend), 40)}")


@dataclass(frozen=True)
class TimesTable:
    """Times of one key. date: UTC, ISO 8601. refused: backend -> why it has no times."""

    key: TimesKey
    date: str
    timings: tuple[Timing, ...]
    refused: Mapping[str, str]

    @property
    def unfit(self) -> dict[str, str]:
        """Return backends that failed or were wrong, and how; others in `refused` lack support."""
        return {name: why for name, why in self.refused.items() if why.startswith(_UNFIT)}

    def near(self, tokens: int) -> dict[str, float]:
        """Return backend -> us at the measured number of tokens nearest by ratio."""
        counts = {t.tokens for t in self.timings}
        if not counts:
            return {}
        nearest = min(counts, key=lambda n: (abs(math.log(n / max(tokens, 1))), n))
        return {t.backend: t.us for t in self.timings if t.tokens == nearest}

    def __str__(self) -> str:
        parts = []
        for tokens in sorted({t.tokens for t in self.timings}):
            near = sorted(self.near(tokens).items(), key=lambda pair: pair[1])
            parts.append(f"{tokens} tokens " + ", ".join(f"{n} {us:.0f} us" for n, us in near))
        return f"{self.key.format}, {self.key.shape}, {self.date[:10]}: " + "; ".join(parts)


@torch.no_grad()
def measure(
    weights: ExpertWeights,
    workload: ExpertWorkload,
    key: TimesKey,
    tokens: tuple[int, ...] = TOKENS,
    repeats: int = REPEATS,
) -> TimesTable:
    """Time every installed backend that supports the workload, on the weights' device.

    A time is the least of `repeats` calls after a warm-up call, on the same random rows for all
    backends. If passes are captured, the timed calls are too: a call that cannot be captured fails.
    """
    timings: list[Timing] = []
    refused: dict[str, str] = {}
    ready: dict[str, Call] = {}
    for count in tokens:
        given = made_up_rows(replace(workload, tokens=count))
        expected = BACKENDS["torch"].ready(weights, workload)(*given)
        for name, backend in BACKENDS.items():
            why = refused.get(name) or backend.why_not(replace(workload, tokens=count))
            if why is not None:
                refused.setdefault(name, why)
                continue
            try:
                call = ready.setdefault(name, ready.get(name) or backend.ready(weights, workload))
                run = _captured(call, given) if workload.graph else partial(call, *given)
                difference = _difference(run(), expected)
                if difference > MOST_DIFFERENCE:
                    refused[name] = f"{_UNFIT[1]} from the reference by {difference:.1e}"
                    continue
                timings.append(Timing(count, name, _least_us(run, workload.device, repeats)))
            except _UNFITTING as error:
                refused[name] = f"{_UNFIT[0]} {first_line(error)}"
    table = TimesTable(key, datetime.now(UTC).isoformat(timespec="seconds"), (), refused)
    return replace(table, timings=tuple(t for t in timings if t.backend not in table.unfit))


def first_line(error: Exception) -> str:
    """Format an error on one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def made_up_rows(s: ExpertWorkload) -> tuple[Tensor, Tensor, Tensor]:
    """Make random x [T, d], ids [T, k] distinct in a row, -1 for absent experts, weights [T, k]."""
    generator = torch.Generator().manual_seed(s.tokens)
    x = torch.randn(s.tokens, s.width, generator=generator)
    ranked = torch.rand(s.tokens, s.experts + s.absent, generator=generator).argsort(-1)
    own = torch.rand(s.tokens, s.top_k, generator=generator) + 0.1
    ids = ranked[:, : s.top_k].contiguous()
    ids = ids.masked_fill(ids >= s.experts, -1)
    return x.to(s.device, s.dtype), ids.to(s.device), (own / own.sum(-1, keepdim=True)).to(s.device)


def _difference(found: Tensor, expected: Tensor) -> float:
    """Compute 1 - 2 <a, b> / (|a|^2 + |b|^2); infinite if there are NaN."""
    a, b = found.double(), expected.double()
    size = float((a * a + b * b).sum())
    difference = 1 - 2 * float((a * b).sum()) / size if size else 0.0
    return difference if math.isfinite(difference) else math.inf


def _captured(call: Call, given: tuple[Tensor, Tensor, Tensor]) -> Callable[[], Tensor]:
    """Capture the call in a CUDA graph and return its replay; on other devices return the call.

    Errors of the capture propagate."""
    if not given[0].is_cuda:
        return partial(call, *given)
    call(*given)  # compile, and allocate persistent buffers, outside the graph
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(*given)

    def replayed() -> Tensor:
        graph.replay()
        return out

    return replayed


def _least_us(run: Callable[[], Tensor], device: str, repeats: int) -> float:
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(repeats):
        wait()
        began = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - began)
    return max(min(times) * 1e6, LEAST_US)


def folder() -> Path:
    """Return the folder of the tables."""
    return cache_root() / "sglang-dspark" / "experts"


def cache_path(key: TimesKey) -> Path:
    """Return the file of this key's table."""
    digest = hashlib.sha256(json.dumps(asdict(key), sort_keys=True).encode()).hexdigest()[:16]
    return folder() / f"{digest}.json"


def save(table: TimesTable, path: Path) -> None:
    """Write the table; readers see the old file or the new one. Raises DSparkError."""
    text = json.dumps({"format_of_table": FORMAT, **asdict(table)}, indent=1, allow_nan=False)
    replace_text(path, text + "\n", "expert times")


def read(path: Path) -> TimesTable:
    """Read a table measured on any device. Raises DSparkError if the file is no such table."""
    with reading(path, "table of expert times", "a new measurement replaces it"):
        document = load_json(path)
        if document.pop("format_of_table") != FORMAT:
            raise ValueError("another format")
        if set(document) != {field.name for field in fields(TimesTable)}:
            raise ValueError("unknown or missing fields")
        timings = tuple(Timing(**row) for row in document["timings"])
        refused = {str(k): str(v) for k, v in document["refused"].items()}
        return TimesTable(TimesKey(**document["key"]), str(document["date"]), timings, refused)


def load(path: Path, key: TimesKey) -> TimesTable:
    """Read a table and check its key. Raises DSparkError if it has another key."""
    table = read(path)
    different = table.key.differences(key)
    if different:
        raise DSparkError(
            f"{path} was measured elsewhere ({brief('; '.join(different))}); "
            "a new measurement replaces it"
        )
    return table


def load_or_measure(weights: ExpertWeights, workload: ExpertWorkload, key: TimesKey) -> TimesTable:
    """Return the cached table of this key; if it is missing or unusable, measure and cache one.

    A table in which a backend failed is not cached, so that the next start tries again. Errors of
    the cache are logged in one line and otherwise ignored.
    """
    try:
        path = cache_path(key)
        if os.path.exists(path):
            return load(path, key)
    except DSparkError as error:
        logger.warning("sglang-dspark: %s", error)
    table = measure(weights, workload, key)
    if not table.unfit:
        try:
            save(table, cache_path(key))
        except DSparkError as error:
            logger.warning("sglang-dspark: %s", error)
    return table
