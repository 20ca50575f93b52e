"""Define and check the arguments of markov_sample.py: the inputs of a batch's draft blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

_REAL = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Noise:
    """The random words of sampled drafts: Philox4x32-10.

    key: 0 <= key < 2^63. offset: [1] int64 on the device, the block's number; the caller increments
    it after each block.
    """

    key: int
    offset: Tensor


@dataclass(frozen=True)
class Mixing:
    """Inputs of W2 in a gated or recurrent head (`sglang_dspark.drafter.heads`).

    from_hidden: [R, gamma, r] or [R, gamma, 3r], the head's projection of the hidden states, its
    bias included; it does not depend on drafts. weight: [r, r], the projection's columns for
    W1[x_{k-1}], or [3r, 2r], those for the state and W1[x_{k-1}].
    """

    from_hidden: Tensor
    weight: Tensor

    @property
    def recurrent(self) -> bool:
        """Return whether a state is carried from position to position."""
        return self.weight.shape[0] != self.weight.shape[1]


@dataclass(frozen=True)
class Judge:
    """The confidence head. features: [R, gamma, d] hidden states. weight: [d] or [d + r] float32,
    the latter for [h_k; W1[x_{k-1}]]. bias: [1] float32."""

    features: Tensor
    weight: Tensor
    bias: Tensor


@dataclass(frozen=True)
class Blocks:
    """Inputs of the draft blocks of R requests. Values are not checked.

    base: [R, gamma, n] float32, bfloat16 or float16, the backbone's logits U_k. anchors: [R] int64
    token ids x_0. w1: [V, r], w2: [n, r], one type of the three. temperatures: [R] float32, 0 for
    argmax drafts, and noise, both None: all are an argmax. logits: written with
    U_k + B(x_{k-1}) in the `step_dtype`, [R, gamma, n], or by token id [R, gamma, V] with
    draft_ids, which leaves tokens outside unchanged; None: not saved. draft_ids: [n]
    int64, token id of each column of a reduced draft vocabulary. mixing: of heads that are not
    vanilla. judge: the confidence head, if any.
    """

    base: Tensor
    anchors: Tensor
    w1: Tensor
    w2: Tensor
    temperatures: Tensor | None = None
    noise: Noise | None = None
    logits: Tensor | None = None
    draft_ids: Tensor | None = None
    mixing: Mixing | None = None
    judge: Judge | None = None

    @property
    def step_dtype(self) -> torch.dtype:
        """Return the type of U_k + B(x_{k-1}): torch's promotion of the two."""
        return torch.promote_types(self.base.dtype, self.w1.dtype)


def mixing_of(head: nn.Module, hidden: Tensor | None) -> Mixing | None:
    """Project hidden states by a head of `sglang_dspark.drafter.heads`; None for a vanilla one.

    hidden: [R, gamma, d], required by the other two.
    """
    gate, joint = getattr(head, "gate_proj", None), getattr(head, "joint_proj", None)
    if gate is None and joint is None:
        return None
    if hidden is None:
        raise ValueError("markov: a head that is not vanilla needs hidden states")
    width = hidden.shape[-1]
    if gate is not None:  # input [h; W1[x]]
        of_hidden, of_token = gate.weight[:, :width], gate.weight[:, width:]
        return Mixing(nn.functional.linear(hidden, of_hidden, gate.bias), of_token)
    assert joint is not None
    own = joint.weight.shape[1] - width  # input [s; W1[x]; h]
    of_hidden = joint.weight[:, own:]
    return Mixing(nn.functional.linear(hidden, of_hidden, joint.bias), joint.weight[:, :own])


def check(given: Blocks, scratch: Tensor | None = None) -> None:
    """Raise ValueError on shapes, types or strides that do not fit."""
    if given.base.dim() != 3 or given.w1.dim() != 2:
        raise ValueError("markov: base must be [R, gamma, n], w1 [V, r]")
    requests, gamma, width = given.base.shape
    vocab = given.w1.shape[0]
    for name, (part, shapes, types, contiguous) in _wanted(given).items():
        if part is None:
            continue
        if tuple(part.shape) not in shapes or part.dtype not in types:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            kinds = " or ".join(str(each).removeprefix("torch.") for each in types)
            found = f"{list(part.shape)} {part.dtype}".replace("torch.", "")
            raise ValueError(f"markov: {name} must be {expected} {kinds}, found {found}")
        if not (part.is_contiguous() if contiguous else part.stride(-1) == 1 or part.dim() == 1):
            raise ValueError(f"markov: {name} must be contiguous")
    if not 1 <= width <= vocab < 2**31:
        raise ValueError(f"markov: {width} columns of logits, {vocab} tokens in w1")
    if (given.temperatures is None) != (given.noise is None):
        raise ValueError("markov: temperatures and noise come together")
    if given.noise is not None and not 0 <= given.noise.key < 2**63:
        raise ValueError(f"markov: the noise's key must be in [0, 2^63), found {given.noise.key}")
    room = 1 + gamma * requests
    if scratch is not None and (scratch.numel() < room or scratch.dtype != torch.int64):
        raise ValueError(f"markov: scratch must be [{room}] int64 or longer")


_Shapes = tuple[tuple[int, ...], ...]
_Wanted = tuple[Tensor | None, _Shapes, tuple[torch.dtype, ...], bool]


def _wanted(given: Blocks) -> dict[str, _Wanted]:
    """Return by name: a part, its allowed shapes and types, and whether it must be contiguous."""
    requests, gamma, width = given.base.shape
    vocab, rank = given.w1.shape
    own, real, whole = (given.w1.dtype,), (torch.float32,), (torch.int64,)
    kept = ((requests, gamma, width if given.draft_ids is None else vocab),)
    offset = None if given.noise is None else given.noise.offset
    wanted: dict[str, _Wanted] = {
        "base": (given.base, ((requests, gamma, width),), _REAL, False),
        "anchors": (given.anchors, ((requests,),), whole, False),
        "w1": (given.w1, ((vocab, rank),), _REAL, True),
        "w2": (given.w2, ((width, rank),), own, True),
        "temperatures": (given.temperatures, ((requests,),), real, True),
        "noise.offset": (offset, ((1,),), whole, True),
        "logits": (given.logits, kept, (given.step_dtype,), False),
        "draft_ids": (given.draft_ids, ((width,),), whole, True),
    }
    if given.mixing is not None:
        hidden, weight = given.mixing.from_hidden, given.mixing.weight
        parts = 3 if given.mixing.recurrent else 1
        square = ((rank, rank), (3 * rank, 2 * rank))
        wanted["mixing.from_hidden"] = (hidden, ((requests, gamma, parts * rank),), _REAL, False)
        wanted["mixing.weight"] = (weight, square, own, False)
    if given.judge is not None:
        features, depth = given.judge.features, given.judge.features.shape[-1]
        weight, depths = given.judge.weight, ((depth,), (depth + rank,))
        wanted["judge.features"] = (features, ((requests, gamma, depth),), _REAL, False)
        wanted["judge.weight"] = (weight, depths, real, True)
        wanted["judge.bias"] = (given.judge.bias, ((1,),), real, True)
    return wanted


def why_not(given: Blocks) -> str | None:
    """Return the reason why `markov_sample` refuses a batch, or None."""
    try:
        check(given)
    except ValueError as error:
        return str(error)
    return None
