"""Penalties of the step: counts on the device, while the host's lists lag a step behind.

A world of requests that come, emit, are retracted and end is played through several steps; each row
of each window must be what SGLang's own penalisers, fed token by token, make of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")

from sglang_dspark.serving.step.penalties import OutputCounts, penalties_of
from tests.serving_cpu.test_penalties import PROMPT, SETTINGS, VOCAB, WIDTH, plainly, request


@dataclass
class Tenant:
    """A request, all it has put out, and where it sits. `req.output_ids` is what the host knows."""

    req: SimpleNamespace
    put_out: list[int]
    row: int


@dataclass
class World:
    """Steps of one server under the overlap loop."""

    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    counts: OutputCounts = field(default_factory=OutputCounts)
    generations: Tensor = field(default_factory=lambda: torch.zeros(16, dtype=torch.int64))
    in_flight: list[tuple[Tenant, list[int]]] = field(default_factory=list)

    def admitted(self, row: int, put_out: list[int] | None = None, **settings: Any) -> Tenant:
        """Behind a prefill: the first token is out, and not on the host yet."""
        self.generations[row] += 1
        known = list(put_out or [])
        tenant = Tenant(request(known.copy(), **settings), [*known, self.token()], row)
        self.in_flight.append((tenant, tenant.put_out.copy()))
        return tenant

    def token(self) -> int:
        return int(torch.randint(0, VOCAB, (1,), generator=self.generator))

    def step(self, tenants: list[Tenant]) -> None:
        """Verify a window of each, compare all of its rows, emit a part of it."""
        rows = torch.tensor([each.row for each in tenants])
        batch = SimpleNamespace(reqs=[each.req for each in tenants], req_pool_indices_cpu=rows)
        found = penalties_of(self.counts, batch, SimpleNamespace(req_generation=self.generations))
        window = torch.randint(0, VOCAB, (len(tenants), WIDTH), generator=self.generator)
        window[:, 0] = torch.tensor([each.put_out[-1] for each in tenants])
        lens = torch.tensor([len(PROMPT) + len(each.put_out) - 1 for each in tenants])
        before = torch.randn(len(tenants), WIDTH, VOCAB, generator=self.generator)
        logits = before.clone()
        if found is not None:
            found.apply(logits.view(-1, VOCAB), window, lens)
        for r, each in enumerate(tenants):
            for j in range(WIDTH):
                text = each.put_out + window[r, 1 : j + 1].tolist()
                expected = plainly(before[r, j][None].clone(), [each.req], [text])[0]
                assert torch.allclose(logits[r, j], expected, atol=1e-5), (r, j)
        commit = torch.randint(1, WIDTH + 1, (len(tenants),), generator=self.generator)
        emitted = torch.randint(0, VOCAB, (len(tenants), WIDTH), generator=self.generator)
        if found is not None:
            # Behind what is emitted anything may stand.
            behind = torch.arange(WIDTH)[None, :] >= commit[:, None]
            found.count(emitted.masked_fill(behind, 3), commit.to(torch.int32))
        for each, tokens, kept in zip(tenants, emitted, commit, strict=True):
            each.put_out += tokens[:kept].tolist()
        for each, known in self.in_flight:  # the step before this one is handed out
            each.req.output_ids = known
        self.in_flight = [(each, each.put_out.copy()) for each in tenants]


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_rows_are_penalised_as_plain_decoding_would(name: str) -> None:
    world = World()
    tenants = [world.admitted(1, **SETTINGS[name]), world.admitted(2)]
    for _ in range(6):
        world.step(tenants)


def test_requests_that_come_and_go_keep_their_own_counts() -> None:
    world = World()
    first, second = (world.admitted(r, **SETTINGS["all"]) for r in (1, 2))
    plain = world.admitted(3)
    world.step([first])
    world.step([first, plain, second])
    third = world.admitted(4, **SETTINGS["frequency"])
    fourth = world.admitted(5, **SETTINGS["repetition"])
    world.step([plain])  # nobody is penalised: the counts rest
    world.step([fourth, second, first, third, plain])
    world.step([third, second])
    world.step([second, fourth, third])
    seats = world.counts.table
    assert seats is not None
    assert len(seats) <= 8, "seats of those who left are taken again"


def test_a_row_with_another_tenant_begins_anew() -> None:
    world = World()
    gone = world.admitted(1, **SETTINGS["all"])
    for _ in range(3):
        world.step([gone])
    back = world.admitted(1, put_out=gone.req.output_ids, **SETTINGS["all"])
    other = world.admitted(2, **SETTINGS["presence"])
    world.step([back, other])
    world.step([other, back])


def test_without_overlap_the_host_knows_the_anchor() -> None:
    world = World()
    known = world.admitted(1, **SETTINGS["all"])
    for _ in range(3):
        known.req.output_ids = known.put_out.copy()
        world.step([known])


def test_a_batch_without_penalties_has_none() -> None:
    world = World()
    ended = world.admitted(1, put_out=[3] * 9, min_new_tokens=6)
    batch = SimpleNamespace(reqs=[ended.req, world.admitted(2).req])
    assert penalties_of(world.counts, batch, None) is None
    assert world.counts.table is None
