"""Shard a drafter's MLPs over several ranks, as SGLang lays out its MoE groups: whole experts by
expert parallelism (EP), parts of their intermediate width by tensor parallelism (TP), or both.

Every rank has the whole router and all tokens. It computes its experts, or its parts of experts,
and its part of the shared experts; the sum over ranks is the layer's output. Gate and up
projections are cut along their rows, down along its columns, so the shard of a rank is a SwiGLU
itself. Quantised weights are cut between blocks of their format: a rank's codes and scales
represent exactly its part of the unsplit weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.drafter.moe import Experts, Router, Routing, SharedExperts, weighted_experts
from sglang_dspark.errors import DSparkError
from sglang_dspark.experts.backends import held_pairs
from sglang_dspark.experts.coded import CodedExperts, CodedShared
from sglang_dspark.quantisation import fp8, mxfp4, nvfp4
from sglang_dspark.quantisation.checkpoint import GLOBAL_SCALE, SCALE, UNQUANTISED

_SUFFIX = f"({GLOBAL_SCALE}|{SCALE})?"
_ROUTED = re.compile(rf"layers\.\d+\.mlp\.experts\.(gate|up|down)_proj{_SUFFIX}")
_JOINT = re.compile(rf"layers\.\d+\.mlp\.(?:shared_experts\.)?(gate|up|down)_proj\.weight{_SUFFIX}")
_BLOCKS = {fp8.NAME: fp8.BLOCK, mxfp4.NAME: mxfp4.BLOCK, nvfp4.NAME: nvfp4.BLOCK}


@dataclass(frozen=True)
class Part:
    """One of `count` equal parts, the `index`-th."""

    index: int = 0
    count: int = 1

    def of(self, size: int) -> int:
        """Return the size of one part of `size`."""
        return size // self.count

    def cut(self, tensor: Tensor, axis: int) -> Tensor:
        """Return this part of a tensor along an axis. Raises DSparkError if parts are unequal."""
        size, odd = divmod(tensor.shape[axis], self.count)
        if odd:
            raise DSparkError(f"{tuple(tensor.shape)} has no {self.count} equal parts")
        return tensor.narrow(axis, self.index * size, size)


@dataclass(frozen=True)
class Split:
    """Shard of a rank. experts: its part of the routed experts; inner: its part of their
    intermediate width; joint: its part of the width of shared experts, or of a dense MLP."""

    experts: Part = Part()
    inner: Part = Part()
    joint: Part = Part()

    @classmethod
    def of_rank(cls, rank: int, tp_size: int, ep_size: int) -> Split:
        """Return a rank's shard in SGLang's layout.

        Neighbouring ranks share experts, in tp_size / ep_size parts of their width. Raises
        DSparkError if ep_size does not divide tp_size.
        """
        parts, odd = divmod(tp_size, ep_size)
        if odd:
            raise DSparkError(f"--ep-size {ep_size} does not divide --tp-size {tp_size}")
        own, inner = divmod(rank, parts)
        return cls(Part(own, ep_size), Part(inner, parts), Part(rank, tp_size))

    @property
    def ranks(self) -> int:
        """Return the number of ranks that share the layer."""
        return self.joint.count


def check_split(c: DrafterConfig, split: Split, where: str) -> None:
    """Raise DSparkError unless all ranks get equal shares of whole experts and whole blocks.

    where: name of the drafter in the message."""
    problem = next(_problems(c, split), None)
    if problem is not None:
        raise DSparkError(f"{where} cannot be split over {split.ranks} ranks: {problem}")


def _problems(c: DrafterConfig, split: Split) -> Iterator[str]:
    ranks, key_heads = split.ranks, c.num_kv_heads
    if c.num_heads % ranks or max(key_heads, ranks) % min(key_heads, ranks):
        yield (
            f"--tp-size {ranks} does not divide its {c.num_heads} query and {key_heads} key heads; "
            "choose one that does"
        )
    if not c.num_experts:
        yield from _width("its MLP's width", c.intermediate_size, ranks, 1, "--tp-size")
        return
    if c.num_experts % split.experts.count:
        yield (
            f"--ep-size {split.experts.count} does not divide its {c.num_experts} experts; choose "
            f"one of {_divisors(c.num_experts)}, or --ep-size 1, which splits each expert"
        )
    block, joint = _BLOCKS.get(c.expert_format, 1), c.num_shared_experts * c.moe_intermediate_size
    own, option = c.moe_intermediate_size, "--tp-size over --ep-size"
    yield from _width("its experts' width", own, split.inner.count, block, option)
    yield from _width("its shared experts' width", joint, ranks, block, "--tp-size")


def _width(what: str, size: int, count: int, block: int, option: str) -> Iterator[str]:
    if count == 1 or not size % (count * block):
        return
    fitting = "1" if size % block else _divisors(size // block)
    blocks = f", in blocks of {block}," if block > 1 else ""
    yield f"{what} {size}{blocks} has no {count} equal parts; choose {option} of {fitting}"


def _divisors(size: int) -> str:
    return ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)


def tensors_of_rank(tensors: Mapping[str, Tensor], split: Split) -> dict[str, Tensor]:
    """Select a rank's part of a checkpoint's tensors, codes and scales of all formats included.

    Tensors that every rank has whole are unchanged. Raises DSparkError, with the tensor's name, if
    parts are unequal.
    """
    return {name: _cut(name, tensor, split) for name, tensor in tensors.items()}


def _cut(name: str, tensor: Tensor, split: Split) -> Tensor:
    routed, joint = _ROUTED.fullmatch(name), _JOINT.fullmatch(name)
    found = routed or joint
    if found is None:
        return tensor
    which, suffix = found.groups()
    try:
        if routed is not None:
            tensor = split.experts.cut(tensor, 0)
        if suffix == GLOBAL_SCALE:  # one for a whole matrix
            return tensor
        width = split.inner if routed is not None else split.joint
        return width.cut(tensor, -1 if which == "down" else -2)
    except DSparkError as error:
        raise DSparkError(f"{name}: {error}") from None


class RankMoE(nn.Module):
    """A rank's part of `drafter.moe.MoE`, under the same names.

    Experts in a quantised format are codes and scales, as in the checkpoint."""

    experts: Experts | CodedExperts
    shared_experts: SharedExperts | CodedShared | None

    def __init__(self, c: DrafterConfig, split: Split):
        super().__init__()
        self.held, inner = split.experts.of(c.num_experts), split.inner.of(c.moe_intermediate_size)
        self.first = split.experts.index * self.held
        self.gate = Router(c)
        coded = c.expert_format != UNQUANTISED
        self.experts = (
            CodedExperts(c.expert_format, self.held, inner, c.hidden_size)
            if coded
            else Experts(self.held, inner, c.hidden_size)
        )
        self.shared_experts = None
        if c.num_shared_experts:
            joint = split.joint.of(c.num_shared_experts * c.moe_intermediate_size)
            self.shared_experts = (
                CodedShared(c.expert_format, c.hidden_size, joint)
                if coded
                else SharedExperts(c.hidden_size, joint)
            )

    def route(self, x: Tensor) -> Routing:
        """Route x [T, d] among the experts of this rank; other ranks' experts have the id -1."""
        routing = self.gate(x)
        if self.held == self.gate.c.num_experts:
            return routing
        own = routing.experts - self.first
        here = (own >= 0) & (own < self.held)
        return Routing(torch.where(here, own, -1), routing.weights)

    def routed(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute x [T, d], ids and weights [T, k] of `route` -> [T, d]: the reference."""
        e = self.experts
        parts: tuple[Tensor, Tensor, Tensor] = (
            e.weights().restored()
            if isinstance(e, CodedExperts)
            else (e.gate_proj, e.up_proj, e.down_proj)
        )

        def call(x: Tensor, ids: Tensor, own: Tensor) -> Tensor:
            return weighted_experts(x, Routing(ids, own), *(part.to(x.dtype) for part in parts))

        return held_pairs(call)(x, ids, weights)


def mlp_of_rank(c: DrafterConfig, split: Split) -> RankMoE | SharedExperts:
    """Build a rank's part of a layer's MLP: of experts, or of a dense one."""
    if c.num_experts:
        return RankMoE(c, split)
    return SharedExperts(c.hidden_size, split.joint.of(c.intermediate_size))
