"""Which implementation computes a layer's experts, and why: by device, format, rows per expert and
graph capture, and by measured times where there are any.

    compiled   CPU: experts restored when they are loaded, products and gate in one compiled call
               (serving/cpu/expert_ops.py); float32, widths in multiples of 16
    triton     CUDA: kernels/grouped_gemm.py on BF16 or FP8 weights, no host synchronisation, so it
               can be captured in a graph
    torch      anywhere: one product an expert on restored weights; it reads counts on the host

Others' grouped GEMMs (DeepGEMM, FlashInfer, SGLang's runner) are not called from here.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dspark.errors import DSparkError
from sglang_dspark.experts import bf16, fp8
from sglang_dspark.experts.formats import expert_format

logger = logging.getLogger(__name__)
BACKENDS = ("compiled", "triton", "torch")  # in the order of preference without measured times
_TRITON_FORMATS = (bf16.NAME, fp8.NAME)
_TRITON_FROM = {bf16.NAME: (8, 0), fp8.NAME: (8, 9)}  # FP8 conversions need Ada or later


@dataclass(frozen=True)
class Situation:
    """What is to be computed where.

    device: torch's device type. capability: of a CUDA device. rows: tokens of an expert in a pass.
    graph: the pass is captured. compiled: the CPU's matrix kernel serves these weights.
    triton: Triton can be imported.
    """

    device: str
    format: str
    rows: int = 1
    graph: bool = False
    capability: tuple[int, int] | None = None
    compiled: bool = False
    triton: bool = False

    def __post_init__(self) -> None:
        expert_format(self.format)
        if self.rows < 0:
            raise DSparkError(f"experts: {self.rows} rows of an expert")


@dataclass(frozen=True)
class Choice:
    """backend: one of BACKENDS. reason: why, in a few words. passed_over: backend -> why not."""

    backend: str
    reason: str
    passed_over: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.backend} ({self.reason})"


def choose(situation: Situation, times: Mapping[str, float] | None = None) -> Choice:
    """The quickest backend by `times` (us, of the backends that were measured), else the first of
    BACKENDS, among those that can. Raises DSparkError where none can, saying why not, each."""
    refused = {name: why for name in BACKENDS if (why := _refusal(name, situation)) is not None}
    able = [name for name in BACKENDS if name not in refused]
    if not able:
        raise DSparkError(
            f"no way to compute {situation.format} experts on {situation.device}: "
            + "; ".join(f"{name}: {why}" for name, why in refused.items())
        )
    measured = {name: us for name, us in (times or {}).items() if name in able}
    if measured:
        best = min(measured, key=lambda name: measured[name])
        slower = {n: f"measured {us:.1f} us" for n, us in measured.items() if n != best}
        return Choice(best, f"measured {measured[best]:.1f} us", refused | slower)
    return Choice(able[0], f"first that serves {situation.format} here", refused)


def _refusal(name: str, s: Situation) -> str | None:
    """Why a backend cannot serve this; None where it can."""
    if name == "compiled":
        if s.device != "cpu":
            return "for CPUs"
        return (
            None if s.compiled else "needs float32, widths in multiples of 16, fused multiply-add"
        )
    if name == "triton":
        return _triton_refusal(s)
    return "reads counts on the host, which a graph cannot" if s.graph else None


def _triton_refusal(s: Situation) -> str | None:
    if s.device != "cuda":
        return "for CUDA devices"
    if not s.triton:
        return "Triton is not installed"
    if s.format not in _TRITON_FORMATS:
        return f"takes {' and '.join(_TRITON_FORMATS)} weights"
    needed = _TRITON_FROM[s.format]
    if s.capability is None or s.capability < needed:
        return f"{s.format} needs compute capability {needed[0]}.{needed[1]}"
    return None


def announce(choice: Choice, wanted: str = BACKENDS[0]) -> None:
    """One log line: what is used, and, where `wanted` is not, why not."""
    missed = choice.passed_over.get(wanted)
    if choice.backend == wanted or missed is None:
        logger.info("sglang-dspark: experts by %s", choice)
    else:
        logger.warning("sglang-dspark: experts by %s; not by %s: %s", choice, wanted, missed)


def with_fallback(
    situation: Situation,
    calls: Mapping[str, Callable[[], Any]],
    times: Mapping[str, float] | None = None,
) -> Any:
    """Call the chosen backend of `calls`; one that fails is logged and the next one is taken.

    Raises DSparkError when all have failed or none can.
    """
    failed: dict[str, str] = {}
    for name in _in_order(situation, times):
        if name not in calls:
            continue
        try:
            return calls[name]()
        except (RuntimeError, ValueError, ImportError) as error:
            failed[name] = str(error).splitlines()[0] if str(error) else type(error).__name__
            logger.warning("sglang-dspark: experts by %s failed: %s", name, failed[name])
    raise DSparkError(f"experts: every backend failed or is missing: {failed or sorted(calls)}")


def _in_order(situation: Situation, times: Mapping[str, float] | None) -> Iterator[str]:
    first = choose(situation, times).backend
    yield first
    able = (n for n in BACKENDS if n != first and _refusal(n, situation) is None)
    known = times or {}
    yield from sorted(able, key=lambda name: known.get(name, float("inf")))


def read_times(path: Path, device: str, situation: Situation) -> dict[str, float]:
    """Backend -> us from a table of measured times, at the row count nearest to the situation's.

    The file is {"device", "versions", "rows": [{"format", "rows", "backend", "us"}]}; one that is
    not there, or of another device, gives nothing. Raises DSparkError for one that is no such file.
    """
    if not path.is_file():
        return {}
    try:
        table = json.loads(path.read_text())
        if table["device"] != device:
            return {}
        found = [r for r in table["rows"] if r["format"] == situation.format]
        near = min((abs(r["rows"] - situation.rows) for r in found), default=0)
        return {
            r["backend"]: float(r["us"]) for r in found if abs(r["rows"] - situation.rows) == near
        }
    except (ValueError, KeyError, TypeError) as error:
        raise DSparkError(f"{path} is no table of expert times ({error}); remove it") from None
