"""Requests behind their speed target count for more; others are left as they are."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_dspark.patches.upstream_fixes.request_limits import check_request
from sglang_dspark.serving.speed_targets import SpeedTargets, target_of

ROWS = 8


@dataclass
class Request:
    """The fields of SGLang's request that are read."""

    row: int | None
    speed: float | None = None
    over: bool = False
    output_ids: list[int] = field(default_factory=list)

    @property
    def sampling_params(self) -> Any:
        asked = None if self.speed is None else {"dspark_speed": self.speed}
        return SimpleNamespace(custom_params=asked)

    @property
    def kv(self) -> Any:
        return SimpleNamespace(req_pool_idx=self.row, holds_kv=self.row is not None)

    def finished(self) -> bool:
        return self.over


class World:
    """Requests that are handed tokens; the clock is moved by hand."""

    def __init__(self, default: float | None = None) -> None:
        self.now = 0.0
        self.targets = SpeedTargets(ROWS, default, clock=lambda: self.now)
        self.generation = np.ones(ROWS, np.int64)

    def step(self, reqs: list[Request], tokens: list[int], seconds: float = 0.1) -> None:
        self.now += seconds
        for req, count in zip(reqs, tokens, strict=True):
            req.output_ids += [0] * count
        self.targets.handed_out(reqs, self.generation)

    def weights(self, rows: list[int]) -> list[float] | None:
        at = np.array(rows)
        found = self.targets.weights(at, self.generation[at])
        return None if found is None else found.tolist()


def test_who_is_behind_counts_for_more() -> None:
    world = World()
    slow, fast, free = Request(1, speed=40.0), Request(2, speed=10.0), Request(3)
    world.step([slow, fast, free], [1, 1, 1])
    assert world.weights([1, 2, 3]) == [1.0, 1.0, 1.0]  # no speed is known yet
    for _ in range(5):
        world.step([slow, fast, free], [2, 2, 2])
    assert world.weights([3, 1, 2]) == pytest.approx([1.0, 2.0, 1.0])
    for _ in range(15):
        world.step([slow, fast, free], [8, 1, 1])  # 65 tokens/s now
    assert world.weights([1, 2, 3]) == pytest.approx([1.0, 1.0, 1.0])


def test_without_a_speed_target_nothing_is_weighed() -> None:
    world = World()
    world.step([Request(1), Request(2)], [1, 1])
    assert world.weights([1, 2]) is None


def test_the_servers_own_target() -> None:
    world = World(default=40.0)
    plain, own = Request(1), Request(2, speed=80.0)
    for _ in range(6):
        world.step([plain, own], [2, 2])
    assert world.weights([1, 2]) == pytest.approx([2.0, 4.0])


def test_a_row_does_not_inherit() -> None:
    world = World()
    ended = Request(1, speed=100.0)
    for _ in range(4):
        world.step([ended], [1])
    assert world.weights([1]) == [4.0]  # 10 of 100 tokens/s, as much as a request may weigh
    ended.over, ended.row = True, None
    world.step([ended], [1])
    world.generation[1] += 1
    assert world.weights([1]) is None
    world.step([Request(1, speed=5.0)], [1])
    assert world.weights([1]) == [1.0]


MANAGER = SimpleNamespace(model_config=SimpleNamespace(vocab_size=9, hidden_size=2))


@pytest.mark.parametrize(
    "asked", [0, -3.0, "fast", True, float("nan"), float("inf"), 10**400, None]
)
def test_a_target_that_is_no_speed_is_refused(asked: object) -> None:
    params = {"dspark_speed": asked}
    with pytest.raises(ValueError, match=r"custom_params.dspark_speed is .* positive number"):
        target_of(params)
    request = SimpleNamespace(sampling_params={"custom_params": params})
    with pytest.raises(ValueError, match="tokens/s wanted"):
        check_request(MANAGER, request, [1])


@pytest.mark.parametrize("custom", [None, {}, {"other": 1}])
def test_no_target_is_no_fault(custom: object) -> None:
    assert target_of(custom) is None
    check_request(MANAGER, SimpleNamespace(sampling_params={"custom_params": custom}), [1])
