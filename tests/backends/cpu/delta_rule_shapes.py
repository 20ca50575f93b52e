"""Small inputs of a gated delta rule layer: three key heads, six value heads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LENGTHS, SLOTS, WIDTH = [3, 1, 5], [2, 5, 1], 6
KEY_HEADS, VALUE_HEADS, KEY, VALUE = 3, 6, 20, 7


def bounds(lengths: list[int]) -> Tensor:
    """Return [R + 1]."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@dataclass
class Case:
    """Random tokens of sequences of `LENGTHS`, and states [7, HV, V, K]."""

    seed: int
    key: int = KEY
    places: list[int] = field(default_factory=lambda: list(range(len(LENGTHS))))
    q: Tensor = field(init=False)
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)
    a: Tensor = field(init=False)
    b: Tensor = field(init=False)
    a_log: Tensor = field(init=False)
    dt_bias: Tensor = field(init=False)
    states: Tensor = field(init=False)
    slots: Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Draw the tensors."""
        torch.manual_seed(self.seed)
        rows = sum(LENGTHS)
        self.q, self.k = (torch.randn(1, rows, KEY_HEADS, self.key) for _ in range(2))
        self.v = torch.randn(1, rows, VALUE_HEADS, VALUE)
        self.a, self.b = (torch.randn(rows, VALUE_HEADS) for _ in range(2))
        self.a_log, self.dt_bias = (torch.randn(VALUE_HEADS) for _ in range(2))
        self.states = torch.randn(7, VALUE_HEADS, VALUE, self.key)
        self.slots = torch.tensor(SLOTS, dtype=torch.int32)

    def inputs(self, lengths: list[int]) -> dict[str, Any]:
        """Return upstream's arguments, but for states."""
        return {
            "A_log": self.a_log,
            "dt_bias": self.dt_bias,
            "q": self.q,
            "k": self.k,
            "v": self.v,
            "a": self.a,
            "b": self.b,
            "initial_state_indices": self.slots,
            "cu_seqlens": bounds(lengths),
            "use_qk_l2norm_in_kernel": True,
            "softplus_beta": 1.0,
            "softplus_threshold": 20.0,
            "is_kda": False,
            "intermediate_state_indices": torch.tensor(self.places, dtype=torch.int32),
            "cache_steps": WIDTH,
            "retrieve_parent_token": None,
        }

    def token(self, row: int, place: int) -> Case:
        """Return one token of a sequence, over the same states."""
        one = Case(self.seed)
        one.q, one.k, one.v = (x[:, place : place + 1] for x in (self.q, self.k, self.v))
        one.a, one.b = (x[place : place + 1] for x in (self.a, self.b))
        one.states, one.slots = self.states, self.slots[row : row + 1]
        one.places = [0]
        return one
