"""Backends of a layer's routed experts under one signature, and the workloads that each supports.

A backend prepares weights once (`prepare`) and returns a call: x [T, d], ids [T, k], weights [T, k]
float32 -> [T, d] in x's dtype, the weighted sum of each token's experts (DeepSeek-V3, 2.1.2),
without shared ones. On one of several ranks ids of -1 are other ranks' experts and count as zero
(sharding.py). Without measured times `dispatch.choose` prefers backends in the order of `BACKENDS`.
Our backends come first. The calls of third-party backends follow their sources and have not been
run, so only a measurement, which also compares results, makes one of them the choice.

    compiled      CPU: products and gate in one compiled call (backends/cpu/expert_ops.py)
    triton        CUDA: kernels/grouped_moe.py, all formats, BF16 rows; can be captured in a graph
    triton-fp8    the same with rows rounded to FP8 on the fly
    deep_gemm     Hopper: DeepGEMM's contiguous FP8 product
    sglang        CUDA: SGLang's Triton fused MoE (backends/moe/expert_backends.py), BF16 and FP8
    humming       CUDA: SGLang's Humming runner (backends/moe/humming_experts.py), MXFP4
    flashinfer    Hopper and later: FlashInfer's CUTLASS fused MoE, BF16
    torch         anywhere: one product an expert on restored weights; reads counts on the host
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch
from torch import Tensor

from sglang_dspark.drafter.moe import Routing, weighted_experts
from sglang_dspark.errors import DSparkError
from sglang_dspark.quantisation.formats import dequantise, expert_format, quantise
from sglang_dspark.quantisation.layout import Quantised

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
GateUpDown = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class ExpertWeights:
    """The routed experts of a layer: gate and up [E, I, d], down [E, d, I].

    They are codes, floating-point values, or both with equal contents. Raises DSparkError for an
    unknown format, shapes that do not fit each other, and NaN or infinite values, codes or scales.
    """

    format: str
    values: GateUpDown | None = None
    codes: tuple[Quantised, Quantised, Quantised] | None = None

    def __post_init__(self) -> None:
        expert_format(self.format)
        if self.values is None and self.codes is None:
            raise DSparkError("experts: neither codes nor values are given")
        for parts in (self.values, self.codes):
            if parts is not None:
                _check_shapes([tuple(part.shape) for part in parts])
        for name, part in zip(("gate", "up", "down"), self.values or (), strict=False):
            _check_finite(f"{name} weights", ~part.isfinite())
        for name, code in zip(("gate", "up", "down"), self.codes or (), strict=False):
            if code.format != self.format:
                raise DSparkError(f"experts: {name} is {code.format}, not {self.format}")
            if code.payload.dtype == torch.float8_e4m3fn:  # 0x7F and 0xFF are NaN
                _check_finite(f"{name} codes", (code.payload.view(torch.uint8) & 127) == 127)
            for scale in (code.scales, code.global_scale):
                if scale is not None:
                    whole = scale.dtype == torch.uint8  # E8M0, whose 255 is NaN
                    bad = scale == 255 if whole else ~scale.float().isfinite()
                    _check_finite(f"{name} scales", bad)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Return (E, I, d)."""
        parts = self.values if self.values is not None else self.codes
        assert parts is not None  # checked in __post_init__
        experts, inner, width = parts[0].shape
        return experts, inner, width

    @property
    def device(self) -> str:
        """Return torch's device type."""
        return (self.values[0] if self.values else self.codes[0].payload).device.type  # type: ignore[index]

    def restored(self) -> GateUpDown:
        """Return gate, up and down in floating point."""
        if self.values is not None:
            return self.values
        assert self.codes is not None
        gate, up, down = (dequantise(code) for code in self.codes)
        return gate, up, down

    def coded(self) -> tuple[Quantised, Quantised, Quantised]:
        """Return gate, up and down as codes; without given codes, quantise the values."""
        if self.codes is not None:
            return self.codes
        assert self.values is not None
        gate, up, down = (quantise(value, self.format) for value in self.values)
        return gate, up, down


def _check_shapes(shapes: list[tuple[int, ...]]) -> None:
    gate, up, down = shapes
    if len(gate) != 3 or up != gate or down != (gate[0], gate[2], gate[1]):
        raise DSparkError(
            f"experts: gate {gate}, up {up} and down {down} are not [E, I, d] twice and [E, d, I]"
        )


def _check_finite(what: str, bad: Tensor) -> None:
    count = int(bad.sum())
    if count:
        raise DSparkError(f"experts: {count} of {bad.numel()} {what} are NaN or infinite")


@dataclass(frozen=True)
class ExpertWorkload:
    """Experts to compute, and the device.

    device: torch's device type; capability: of a CUDA device. experts, inner, width: E, I, d of a
    layer; top_k: experts of a token. tokens: of a pass. dtype: of the rows. graph: the pass is
    captured. absent: experts of the layer that other ranks hold, in addition to the E of this rank.
    Raises DSparkError for an unknown format and for numbers out of range.
    """

    device: str
    format: str
    experts: int = 8
    inner: int = 512
    width: int = 576
    top_k: int = 2
    tokens: int = 8
    dtype: torch.dtype = torch.float32
    graph: bool = False
    capability: tuple[int, int] | None = None
    absent: int = 0

    def __post_init__(self) -> None:
        expert_format(self.format)
        if min(self.tokens, self.absent) < 0 or min(self.experts, self.inner, self.width) < 1:
            raise DSparkError(
                f"experts: {self.tokens} tokens for {self.experts} experts of "
                f"{self.width} x {self.inner}"
            )
        if not 1 <= self.top_k <= self.experts + self.absent:
            raise DSparkError(f"experts: top {self.top_k} of {self.experts + self.absent}")

    @property
    def rows(self) -> float:
        """Return the mean number of tokens of an expert."""
        return self.tokens * self.top_k / (self.experts + self.absent)

    def of_pairs(self) -> ExpertWorkload:
        """Return the workload of a call in `held_pairs`: a row for each (token, expert) pair."""
        return replace(self, tokens=self.tokens * self.top_k, top_k=1, absent=0)


@dataclass(frozen=True)
class Backend:
    """An implementation of routed experts.

    missing: returns what is not installed here, or None. refusal: returns why it does not support
    a workload, or None. prepare: turns weights into a call. skips: that call skips ids of -1."""

    name: str
    missing: Callable[[], str | None]
    refusal: Callable[[ExpertWorkload], str | None]
    prepare: Callable[[ExpertWeights], Call]
    skips: bool = False

    def why_not(self, workload: ExpertWorkload) -> str | None:
        """Return why the backend does not support the workload, or None if it does."""
        if workload.absent and not self.skips:
            if workload.graph:
                return "its rank's experts are looked up on the host, which a graph cannot"
            workload = workload.of_pairs()
        return self.refusal(workload) or self.missing()

    def ready(self, weights: ExpertWeights, workload: ExpertWorkload) -> Call:
        """Prepare a call; it skips experts that other ranks hold."""
        call = self.prepare(weights)
        return held_pairs(call) if workload.absent and not self.skips else call


def held_pairs(call: Call) -> Call:
    """Wrap a call that does not support ids of -1 so that they count as zero.

    `call` gets each other (token, expert) pair as a token of one expert. The ids are read on the
    host."""

    def held(x: Tensor, ids: Tensor, own: Tensor) -> Tensor:
        token, choice = (ids >= 0).nonzero(as_tuple=True)
        out = torch.zeros_like(x)
        if len(token):
            made = call(x[token], ids[token, choice, None], own[token, choice, None])
            out.index_add_(0, token, made)
        return out

    return held


BACKENDS: dict[str, Backend] = {}


def register(backend: Backend, before: str | None = None) -> None:
    """Add a backend in front of `before`, by default last; a registered name is ignored."""
    if backend.name in BACKENDS:
        return
    order = list(BACKENDS.items())
    at = list(BACKENDS).index(before) if before else len(order)
    BACKENDS.clear()
    BACKENDS.update([*order[:at], (backend.name, backend), *order[at:]])


def needs(package: str) -> Callable[[], str | None]:
    """Return a probe for a package that is imported only where it is used."""
    return lambda: None if find_spec(package) else f"{package} is not installed"


def _torch_refusal(s: ExpertWorkload) -> str | None:
    return "reads counts on the host, which a graph cannot" if s.graph else None


def _prepare_torch(weights: ExpertWeights) -> Call:
    restored = weights.restored()
    by_dtype: dict[torch.dtype, list[Tensor]] = {}

    def call(x: Tensor, ids: Tensor, own: Tensor) -> Tensor:
        if x.dtype not in by_dtype:
            by_dtype[x.dtype] = [part.to(x.dtype) for part in restored]
        return weighted_experts(x, Routing(ids.long(), own), *by_dtype[x.dtype])

    return call


def joined(first: Quantised, second: Quantised) -> Quantised:
    """Join two weights [E, N, K] into one [E, 2N, K].

    Raises DSparkError if a block would contain rows of both (FP8, N no multiple of 128), and if
    each has its own scale over the whole matrix (NVFP4).
    """
    experts, rows, width = first.shape
    if first.global_scale is not None:
        raise DSparkError(f"{first.format}: gate and up have overall scales of their own")
    if first.format == "fp8" and rows % 128:
        raise DSparkError(f"fp8: {rows} rows are no whole number of blocks of 128")
    scales = None
    if first.scales is not None and second.scales is not None:
        scales = _stacked(first.scales, second.scales)
    payload = _stacked(first.payload, second.payload)
    return Quantised(first.format, (experts, 2 * rows, width), payload, scales)


def _stacked(first: Tensor, second: Tensor) -> Tensor:
    """Stack two [E, N, K] into [E, 2N, K]; without a copy if they are halves of such a tensor."""
    experts, rows, width = first.shape
    shape, size = (experts, 2 * rows, width), rows * width
    halves = (
        first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        and second.storage_offset() == first.storage_offset() + size
        and first.stride()[1:] == second.stride()[1:] == (width, 1)
        and (experts == 1 or first.stride(0) == second.stride(0) == 2 * size)
    )
    if halves:
        return first.as_strided(shape, (2 * size, width, 1))
    parts = [first.view(torch.uint8), second.view(torch.uint8)]  # `cat` lacks FP8
    return torch.cat(parts, 1).view(first.dtype)


register(Backend("torch", lambda: None, _torch_refusal, _prepare_torch))
