"""The leader reports a failed admission to the ranks that wait for its windows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from sglang_dspark.step.ranks import NO_WINDOWS, Ranks


@pytest.mark.parametrize(
    ("several", "speculates", "device", "sent"),
    [
        (True, True, "cpu", [[NO_WINDOWS] * 4]),
        (True, False, "cpu", []),
        (True, True, "meta", []),
        (False, True, "cpu", []),
    ],
)
def test_a_failed_admission_is_announced_where_windows_are_awaited(
    several: bool, speculates: bool, device: str, sent: list[list[int]]
) -> None:
    seen: list[list[int]] = []

    def broadcast(tensor: Tensor) -> None:
        seen.append(tensor.tolist())

    ranks = Ranks(broadcast=broadcast if several else None, device=device)
    plan: Any = SimpleNamespace(speculates=speculates, requests=3)
    with pytest.raises(KeyError, match="of the planner"), ranks.admitting(plan):
        raise KeyError("of the planner")
    assert seen == sent
