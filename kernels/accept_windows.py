"""Define and check the arguments of accept_sampled.py and accept_block.py: a step's windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TOP_K, TOP_P, MIN_P, DENSE, GREEDY, SEEDED = (1 << bit for bit in range(6))  # of `Windows.flags`
_LOGITS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Windows:
    """A step's windows. Values are not looked at; settings that are None apply to no request.

    drafts: [R, gamma] int64. lengths: [R] int32 or int64, drafts verified, 0..gamma. logits:
    [R * (gamma + 1), V] float32, bfloat16 or float16. temperatures: [R] float32 > 0; greedy
    requests may have any. accept_uniforms: [R, gamma], bonus_uniforms: [R], float64 in [0, 1).
    top_k: [R] int32 or int64 >= 1. top_p: [R] float32, from 1 on nothing is cut. min_p: [R] float32
    in [0, 1]. draft_logits: [R, gamma, V] that drafts were drawn from at draft_temperatures [R]
    float32 > 0, both None for drafts that are an argmax. greedy: [R] bool, requests that take the
    argmax. seeds: [R] int64 and anchors: [R] int64, positions of the anchors, for the requests that
    seeded [R] bool names.
    """

    drafts: Tensor
    lengths: Tensor
    logits: Tensor
    temperatures: Tensor
    accept_uniforms: Tensor
    bonus_uniforms: Tensor
    top_k: Tensor | None = None
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    draft_logits: Tensor | None = None
    draft_temperatures: Tensor | None = None
    greedy: Tensor | None = None
    seeded: Tensor | None = None
    seeds: Tensor | None = None
    anchors: Tensor | None = None

    def operands(self) -> tuple[Tensor, ...]:
        """Return all of them in the order of the kernels' parameters; flags as bytes.

        In place of one that is None stands another of its type, which the kernels do not read:
        `flags` says so. Each pattern of None would be compiled by itself.
        """
        byte = self.drafts.view(torch.uint8)
        return (
            self.drafts,
            self.lengths,
            self.logits,
            self.temperatures,
            self.accept_uniforms,
            self.bonus_uniforms,
            self.lengths if self.top_k is None else self.top_k,
            self.temperatures if self.top_p is None else self.top_p,
            self.temperatures if self.min_p is None else self.min_p,
            self.logits if self.draft_logits is None else self.draft_logits,
            self.temperatures if self.draft_temperatures is None else self.draft_temperatures,
            byte if self.greedy is None else self.greedy.view(torch.uint8),
            byte if self.seeded is None else self.seeded.view(torch.uint8),
            self.drafts if self.seeds is None else self.seeds,
            self.drafts if self.anchors is None else self.anchors,
        )

    @property
    def flags(self) -> int:
        """Bits of the settings that are given."""
        bits = {
            TOP_K: self.top_k,
            TOP_P: self.top_p,
            MIN_P: self.min_p,
            DENSE: self.draft_logits,
            GREEDY: self.greedy,
            SEEDED: self.seeded,
        }
        return sum(bit for bit, part in bits.items() if part is not None)


def check(given: Windows, arrivals: Tensor | None = None) -> None:
    """Raises ValueError on shapes, types or strides that do not fit."""
    if given.drafts.dim() != 2 or given.logits.dim() != 2:
        raise ValueError("accept: drafts must be [R, gamma], logits [R * (gamma + 1), V]")
    requests, gamma = given.drafts.shape
    vocab = given.logits.shape[1]
    integer, real, flag = (torch.int32, torch.int64), (torch.float32,), (torch.bool,)
    per_request: dict[str, tuple[torch.dtype, ...]] = {
        "lengths": integer, "temperatures": real, "bonus_uniforms": (torch.float64,),
        "top_k": integer, "top_p": real, "min_p": real, "draft_temperatures": real,
        "greedy": flag, "seeded": flag, "seeds": (torch.int64,), "anchors": integer,
    }  # fmt: skip
    wanted: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]]
    wanted = {name: ((requests,), types) for name, types in per_request.items()}
    wanted["drafts"] = ((requests, gamma), (torch.int64,))
    wanted["accept_uniforms"] = ((requests, gamma), (torch.float64,))
    wanted["logits"] = ((requests * (gamma + 1), vocab), _LOGITS)
    wanted["draft_logits"] = ((requests, gamma, vocab), _LOGITS)
    for name, (shape, types) in wanted.items():
        part = getattr(given, name)
        if part is None:
            continue
        if tuple(part.shape) != shape or part.dtype not in types:
            expected = " or ".join(str(each).removeprefix("torch.") for each in types)
            found = f"{list(part.shape)} {part.dtype}".replace("torch.", "")
            raise ValueError(f"accept: {name} must be {list(shape)} {expected}, found {found}")
        strided = name in ("logits", "draft_logits") and part.stride(-1) == 1
        if not (strided or part.is_contiguous()):
            raise ValueError(f"accept: {name} must be contiguous")
    if (given.draft_logits is None) != (given.draft_temperatures is None):
        raise ValueError("accept: draft_logits and draft_temperatures come together")
    if len({part is None for part in (given.seeded, given.seeds, given.anchors)}) > 1:
        raise ValueError("accept: seeded, seeds and anchors come together")
    if arrivals is not None and (len(arrivals) < requests or arrivals.dtype != torch.int32):
        raise ValueError(f"accept: arrivals must be [{requests}] int32 or longer")


def why_not(given: Windows) -> str | None:
    """Return what `accept_sampled` refuses in a step; None if nothing."""
    try:
        check(given)
    except ValueError as error:
        return str(error)
    return None
