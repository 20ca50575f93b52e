"""Define and check the arguments of the operators that accept sampled drafts: a step's windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_LOGITS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Windows:
    """A step's windows. Values are not checked; settings that are None apply to no request.

    drafts: [R, gamma] int64. lengths: [R] int32 or int64, drafts verified, 0..gamma. logits:
    [R * (gamma + 1), V] float32, bfloat16 or float16. temperatures: [R] float32 > 0; greedy
    requests may have any. accept_uniforms: [R, gamma], bonus_uniforms: [R], float64 in [0, 1).
    top_k: [R] int32 or int64 >= 1. top_p: [R] float32, no cut from 1 on. min_p: [R] float32
    in [0, 1]. draft_logits: [R, gamma, V] that drafts were drawn from at draft_temperatures [R]
    float32 > 0, both None for drafts that are an argmax. greedy: [R] bool, requests that decode by
    argmax. seeds: [R] int64 and anchors: [R] int64, positions of the anchors, for the requests
    marked in seeded [R] bool. skipped: [R] bool, requests whose outcome is not written.
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
    skipped: Tensor | None = None

    def operands(self) -> tuple[Tensor | None, ...]:
        """Return all tensors in the order of the kernels' parameters; flags as bytes."""
        greedy, seeded, skipped = (
            None if flag is None else flag.view(torch.uint8)
            for flag in (self.greedy, self.seeded, self.skipped)
        )
        return (
            self.drafts,
            self.lengths,
            self.logits,
            self.temperatures,
            self.accept_uniforms,
            self.bonus_uniforms,
            self.top_k,
            self.top_p,
            self.min_p,
            self.draft_logits,
            self.draft_temperatures,
            greedy,
            seeded,
            self.seeds,
            self.anchors,
            skipped,
        )


def check(given: Windows, arrivals: Tensor | None = None) -> None:
    """Raise ValueError on shapes, types or strides that do not fit."""
    if given.drafts.dim() != 2 or given.logits.dim() != 2:
        raise ValueError("accept: drafts must be [R, gamma], logits [R * (gamma + 1), V]")
    requests, gamma = given.drafts.shape
    vocab = given.logits.shape[1]
    integer, real, flag = (torch.int32, torch.int64), (torch.float32,), (torch.bool,)
    per_request: dict[str, tuple[torch.dtype, ...]] = {
        "lengths": integer, "temperatures": real, "bonus_uniforms": (torch.float64,),
        "top_k": integer, "top_p": real, "min_p": real, "draft_temperatures": real,
        "greedy": flag, "seeded": flag, "skipped": flag,
        "seeds": (torch.int64,), "anchors": integer,
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
    """Return the reason why `accept_sampled` refuses a step, or None."""
    try:
        check(given)
    except ValueError as error:
        return str(error)
    return None
