"""Penalties of the step: counts on the device, while the host's lists lag a step behind.

A world of requests that come, emit, are retracted and end is played through several steps; each row
of each window must be what SGLang's own penalisers, fed token by token, make of it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")

from sglang_dspark.step import penalties
from sglang_dspark.step.penalties import OutputCounts, penalties_of
from sglang_dspark.verify.penalties import penalise_windows
from tests.step.penalised import EOS, PROMPT, SETTINGS, VOCAB, WIDTH, plainly, request


@dataclass
class Running:
    """A request, all it has put out, and where it sits. `req.output_ids` is what the host knows."""

    req: SimpleNamespace
    put_out: list[int]
    row: int


@dataclass
class World:
    """Steps of one server under the overlap loop."""

    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    counts: OutputCounts = field(default_factory=OutputCounts)
    generation: Tensor = field(default_factory=lambda: torch.zeros(16, dtype=torch.int64))
    in_flight: list[tuple[Running, list[int]]] = field(default_factory=list)
    launch: penalties.Launch | None = None
    rows: int = WIDTH  # of each window that are penalised

    def admitted(self, row: int, put_out: list[int] | None = None, **settings: Any) -> Running:
        """Behind a prefill: the first token is out, and not on the host yet."""
        self.generation[row] += 1
        known = list(put_out or [])
        running = Running(request(known.copy(), **settings), [*known, self.token()], row)
        self.in_flight.append((running, running.put_out.copy()))
        return running

    def token(self) -> int:
        return int(torch.randint(0, VOCAB, (1,), generator=self.generator))

    def step(self, running: list[Running]) -> None:
        """Verify a window of each, compare all of its rows, emit a part of it."""
        rows = torch.tensor([each.row for each in running])
        batch = SimpleNamespace(reqs=[each.req for each in running], req_pool_indices_cpu=rows)
        found = penalties_of(self.counts, batch, SimpleNamespace(req_generation=self.generation))
        window = torch.randint(0, VOCAB, (len(running), WIDTH), generator=self.generator)
        window[:, 0] = torch.tensor([each.put_out[-1] for each in running])
        lens = torch.tensor([len(PROMPT) + len(each.put_out) - 1 for each in running])
        before = torch.randn(len(running), WIDTH, VOCAB, generator=self.generator)
        logits = before.clone()
        if found is not None:
            found.apply(logits.view(-1, VOCAB), window[:, : self.rows], lens, self.launch)
        assert torch.equal(logits[:, self.rows :], before[:, self.rows :])
        for r, each in enumerate(running):
            for j in range(self.rows):
                text = each.put_out + window[r, 1 : j + 1].tolist()
                expected = plainly(before[r, j][None].clone(), [each.req], [text])[0]
                assert torch.allclose(logits[r, j], expected, atol=1e-5), (r, j)
        commit = torch.randint(1, WIDTH + 1, (len(running),), generator=self.generator)
        emitted = torch.randint(0, VOCAB, (len(running), WIDTH), generator=self.generator)
        if found is not None:
            # Behind what is emitted anything may stand.
            behind = torch.arange(WIDTH)[None, :] >= commit[:, None]
            found.count(emitted.masked_fill(behind, 3), commit.to(torch.int32))
        for each, tokens, kept in zip(running, emitted, commit, strict=True):
            each.put_out += tokens[:kept].tolist()
        for each, known in self.in_flight:  # the step before this one is handed out
            each.req.output_ids = known
        self.in_flight = [(each, each.put_out.copy()) for each in running]


def crowded(world: World) -> None:
    """Some steps of seven requests, five of them penalised."""
    names = ["all", "frequency", "none", "repetition", "negative", "none", "presence"]
    requests = [world.admitted(1 + i, **SETTINGS[name]) for i, name in enumerate(names)]
    for _ in range(4):
        world.step(requests)


@pytest.mark.parametrize("rows", [1, 2])
def test_rows_that_cannot_be_accepted_are_not_penalised(rows: int) -> None:
    crowded(World(rows=rows))


@pytest.mark.parametrize("rows", [1, WIDTH])
def test_one_launch_penalises_all_requests(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the table, the slots and the settings of all of them."""
    launched: list[int] = []

    def launch(logits: Tensor, places: Tensor, window: Tensor, table: Tensor, slots: Tensor,
               outputs: Tensor, settings: Any) -> None:  # fmt: skip
        assert logits.shape[:2] == window.shape, "the kernel requires it"
        launched.append(len(places))
        penalise_windows(logits, places, window, table[slots], outputs, settings)

    monkeypatch.setattr(penalties, "penalise_windows", lambda *_: pytest.fail("both ways"))
    crowded(World(rows=rows, launch=launch))
    assert launched == [5] * 4


@pytest.mark.parametrize(
    ("together", "parts"), [(1, [1] * 5), (2, [2, 2, 1]), (3, [3, 2]), (5, [5])]
)
def test_requests_are_penalised_in_parts(
    monkeypatch: pytest.MonkeyPatch, together: int, parts: list[int]
) -> None:
    taken: list[int] = []

    def penalise(logits: Tensor, rows: Tensor, *given: Any) -> None:
        taken.append(len(rows))
        penalise_windows(logits, rows, *given)

    monkeypatch.setattr(penalties, "AT_ONCE", together * VOCAB * 4)
    monkeypatch.setattr(penalties, "penalise_windows", penalise)
    crowded(World())
    assert taken == parts * 4


def test_counts_are_allocated_again_once_cached_blocks_are_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    copied = penalties._copied

    def short(old: Tensor | None, rows: int, like: Tensor) -> Tensor:
        done.append(f"counts of {rows}")
        if "freed" not in done:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return copied(old, rows, like)

    monkeypatch.setattr(penalties, "_copied", short)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("freed"))
    crowded(World())
    assert done == ["counts of 5", "freed", "counts of 5"]


def test_counts_are_allocated_at_start_where_they_are_small(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    counts, device = OutputCounts(), torch.device("cpu")
    counts.reserve(48, 151_936, device)
    assert counts.table is not None
    assert counts.table.shape == (48, 151_936)
    exact = counts.table
    assert counts.grown(48, torch.empty(1, 151_936)) is counts.table is exact
    large = OutputCounts()
    large.reserve(512, 151_936, device)
    assert large.table is None

    def none_left(*sizes: int, **options: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", none_left)
    unlucky = OutputCounts()
    unlucky.reserve(48, 151_936, device)
    assert unlucky.table is None
    first, second, third = [record.getMessage() for record in caplog.records]
    assert "output counts of penalties take 29 MB" in first
    assert "311 MB of output counts are allocated for the first request" in second
    assert "no memory for 29 MB" in third


def test_counts_of_another_vocabulary_are_not_used() -> None:
    """Logits may be padded wider than the model's configuration says."""
    world = World()
    world.counts.reserve(4, VOCAB - 1, torch.device("cpu"))
    crowded(world)


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_rows_are_penalised_as_plain_decoding_would(name: str) -> None:
    world = World()
    running = [world.admitted(1, **SETTINGS[name]), world.admitted(2)]
    for _ in range(6):
        world.step(running)


def test_requests_that_come_and_go_keep_their_own_counts() -> None:
    world = World()
    first, second = (world.admitted(r, **SETTINGS["all"]) for r in (1, 2))
    plain = world.admitted(3)
    world.step([first])
    world.step([first, plain, second])
    third = world.admitted(4, **SETTINGS["frequency"])
    fourth = world.admitted(5, **SETTINGS["repetition"])
    world.step([plain])  # no request is penalised: the counts stay
    world.step([fourth, second, first, third, plain])
    world.step([third, second])
    world.step([second, fourth, third])
    slots = world.counts.table
    assert slots is not None
    assert len(slots) <= 8, "slots of those who left are taken again"


def test_a_row_with_another_generation_begins_anew() -> None:
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


def test_lists_of_stops_are_padded_with_their_last_token() -> None:
    """A batch's lists differ in length; one that is empty forbids token 0 of no request."""
    reqs = [
        request([], min_new_tokens=4, stop_token_ids={7, 9}),
        request([], min_new_tokens=2, stop_token_ids=set()),
        request([], min_new_tokens=0, stop_token_ids={7, 8, 9}),
        request([], min_new_tokens=3, stop_token_ids={7}),
    ]
    found = penalties.settings_of(reqs, torch.zeros(4, 16))
    assert sorted(found.stops[0].tolist()) == sorted({7, 9, EOS})
    assert found.stops[1].tolist() == [EOS] * 3
    assert found.stops[2].tolist() == [0] * 3
    assert found.stops[3].tolist() == [EOS, 7, 7]
    assert found.minimum.tolist() == [[4], [2], [0], [3]]
