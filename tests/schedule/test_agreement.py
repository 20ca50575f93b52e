"""Messages hold whole plans.

What ranks do with plans is tested through the engine, in tests/step/test_ranks.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from sglang_dspark.schedule.agreement import HEADER, Agreement, decode, encode
from sglang_dspark.schedule.budget import Budget
from sglang_dspark.schedule.guard import Mode
from sglang_dspark.schedule.plan import Plan
from tests.schedule.properties import EXAMPLES


def same(one: Plan, other: Plan) -> bool:
    """Every field, arrays and bits of floats included."""
    arrays = ("limits", "floors", "weights")
    plain = dict.fromkeys(arrays, None)
    if replace(one, **plain) != replace(other, **plain):  # type: ignore[arg-type]
        return False
    for name in arrays:
        mine, theirs = getattr(one, name), getattr(other, name)
        if (mine is None) != (theirs is None) or not np.array_equal(mine, theirs):
            return False
    return True


@EXAMPLES
@given(
    requests=st.integers(1, 6),
    numbers=st.lists(st.integers(0, 2**40), min_size=4, max_size=4),
    floats=st.lists(st.floats(allow_nan=False), min_size=3, max_size=3),
    mode=st.sampled_from(Mode),
    flags=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_follower_holds_the_leaders_plan(
    requests: int,
    numbers: list[int],
    floats: list[float],
    mode: Mode,
    flags: tuple[bool, bool],
    seed: int,
) -> None:
    """Ranks agree: what comes out of the message is what went in, bit for bit."""
    rng = np.random.default_rng(seed)
    plan = Plan(
        numbers[0],
        requests,
        numbers[1],
        Budget(numbers[2], int(rng.integers(0, 8)), floats[0], floats[1]),
        rng.integers(0, 8, requests),
        rng.integers(0, 8, requests) if flags[0] else None,
        mode,
        flags[1],
        numbers[3],
        floats[2],
        rng.uniform(0, 4, requests).astype(np.float32) if flags[1] else None,
    )
    message = rng.integers(0, 2**62, HEADER + 3 * 6)  # what an earlier step left there
    encode(plan, message)
    assert same(decode(message), plan)


def test_mistakes_are_named() -> None:
    plan = Plan(0, 3, 0, Budget(0, 0, 1.0, 1.0), np.ones(3, np.int64), None, Mode.PLAIN, True, 0, 1)
    with pytest.raises(ValueError, match="does not fit a message for 2"):
        encode(plan, np.zeros(HEADER + 6, np.int64))


def test_messages_stay_in_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of data-parallel replicas decide apart: the default group would mix them."""
    sent = []
    monkeypatch.setattr(dist, "get_rank", lambda: 4)
    monkeypatch.setattr(
        dist, "broadcast", lambda tensor, src, group=None: sent.append((src, group))
    )
    group: Any = object()
    agreement = Agreement(3, group, leader=4)
    assert agreement.leads
    budget, limits = Budget(1, 2, 1.0, 1.0), np.ones(2, np.int64)
    plan = Plan(0, 2, 0, budget, limits, None, Mode.SPECULATE, True, 0, 1.0)
    agreement.send(plan, np.arange(2))
    assert sent == [(4, group)]
