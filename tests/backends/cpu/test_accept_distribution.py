"""Test that served drafting with ragged acceptance has the target's distribution.

Every temperature and cut is tested, all cuts in one batch. Drafts come from the served hook and
windows have random lengths. Chi-square compares the first two tokens of each step with the target's
chain.
The same test must catch an accept rule with one step changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dspark.backends.cpu import accept as served
from sglang_dspark.step import accept as step_accept
from sglang_dspark.verify import (
    BatchSampling,
    accept_block,
    accept_sampled,
    sample_inverse_cdf,
    target_distribution,
)
from tests.backends.cpu.draft_world import ALL, Drafting, settings
from tests.mutants.catalogue import of_area
from tests.mutants.mutant import NAME, Mutant
from tests.step.accept_rule import configured

V, INSIDE, GAMMA, RANK = 12, 9, 2, 3
STEPS = 200_000  # of each temperature and cut
BATCH = 50_000  # requests in a batch
ALARM = 1e-4
TEMPERATURES = (0.5, 0.8, 1.3)
# (top_k, top_p, min_p)
CUTS = {
    "uncut": (ALL, 1.0, 0.0),
    "top_k": (5, 1.0, 0.0),
    "top_p": (ALL, 0.8, 0.0),
    "min_p": (ALL, 1.0, 0.1),
    "all cuts": (6, 0.9, 0.05),
}


def table(seed: int, rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.8


TARGET = table(1, V, V)  # logits behind each last token
BASE = table(2, GAMMA, INSIDE)
ANCHOR = V - 1


@lru_cache(maxsize=1)
def drafting() -> Drafting:
    return Drafting(torch.arange(INSIDE) + 1, table(3, V, RANK) * 0.6, table(4, INSIDE, RANK) * 0.6)


def batch_settings(temperature: float, rows: int) -> Any:
    """Cuts taken in turn, so that neighbours in the batch differ."""
    top_k, top_p, min_p = zip(*CUTS.values(), strict=True)
    turn = torch.arange(rows) % len(CUTS)
    return settings(
        torch.full((rows,), temperature),
        torch.tensor(top_k)[turn],
        torch.tensor(top_p)[turn],
        torch.tensor(min_p)[turn],
    )


def chain(temperature: float, cut: tuple[int, float, float]) -> Tensor:
    """Return the target's distribution after each last token: [V, V] float64."""
    return target_distribution(TARGET[None], BatchSampling.uniform(1, temperature, *cut))[
        0
    ].double()


def two_tokens(module: ModuleType, temperature: float, generator: torch.Generator) -> Tensor:
    """The first two tokens of BATCH requests, [BATCH, 2]; the second by the target if need be."""
    info = batch_settings(temperature, BATCH)
    anchors = torch.full((BATCH,), ANCHOR)
    block = drafting().block(BASE.expand(BATCH, -1, -1).contiguous(), anchors, info)
    window = torch.cat([anchors[:, None], block.draft_tokens], 1)
    lens = torch.randint(1, GAMMA + 2, (BATCH,), generator=generator)
    inside = torch.arange(GAMMA + 1)[None, :] < lens[:, None]
    logits = TARGET[window[inside]]  # [B, V]
    starts = lens.cumsum(0) - lens
    accepted, bonus = module.accept(window, lens, starts, logits, block, info, anchors)
    first = torch.where(accepted > 0, window[:, 1], bonus)
    then = torch.where(accepted > 1, window[:, 2], bonus)
    follow = torch.empty_like(first)
    for turn, cut in enumerate(CUTS.values()):
        mine = slice(turn, None, len(CUTS))
        uniforms = torch.rand(len(first[mine]), dtype=torch.float64, generator=generator)
        follow[mine] = sample_inverse_cdf(chain(temperature, cut)[first[mine]], uniforms)
    return torch.stack([first, torch.where(accepted > 0, then, follow)], 1)


def p_values(module: ModuleType, temperature: float, seed: int, steps: int) -> dict[str, float]:
    """Chi-square p-value of the first two tokens by cut, over `steps` steps of each cut."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    drafting().noise.offset.fill_(seed * 10_000)
    counts = torch.zeros(len(CUTS), V * V)
    for _ in range(-(-steps * len(CUTS) // BATCH)):
        pair = two_tokens(module, temperature, generator)
        cell = pair[:, 0] * V + pair[:, 1]
        for turn in range(len(CUTS)):
            counts[turn] += torch.bincount(cell[turn :: len(CUTS)], minlength=V * V)
    found = {}
    for turn, (name, cut) in enumerate(CUTS.items()):
        distribution = chain(temperature, cut)
        expected = (distribution[ANCHOR][:, None] * distribution).flatten() * counts[turn].sum()
        found[name] = chi_square(counts[turn].double(), expected)
    return found


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """Pearson's p-value; rare cells count as one, and impossible ones must be empty."""
    if int(counts[expected <= 0].sum()):
        return 0.0
    frequent = expected >= 5
    counts = torch.cat([counts[frequent], counts[~frequent].sum()[None]])
    expected = torch.cat([expected[frequent], expected[~frequent].sum()[None]])
    if float(expected[-1]) < 5:
        counts, expected = counts[:-1], expected[:-1]
    assert len(counts) > 5, "too few cells for a test"
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(counts) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def mutated(mutant: Mutant) -> ModuleType:
    """The served module with one piece of its source, or of `step.accept`, exchanged."""
    if mutant.file.endswith("step/accept.py"):
        module = compiled(inspect.getsource(served))
        vars(module)["judge"] = compiled(mutant.applied(inspect.getsource(step_accept))).judge
        return module
    return compiled(mutant.applied(inspect.getsource(served)))


def compiled(source: str) -> ModuleType:
    module = ModuleType("mutated")
    exec(compile(source, "mutated", "exec"), module.__dict__)
    return module


@pytest.fixture(params=["block", "token"])
def rule(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[str]:
    """Configured for the test."""
    with configured(served, request.param, tmp_path, monkeypatch):
        yield request.param


def test_the_configured_rule_is_served(rule: str) -> None:
    assert (served.sampled_rule() is accept_sampled) == (rule == "token")


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_two_tokens_follow_the_target(temperature: float, rule: str) -> None:
    found = p_values(served, temperature, seed=1, steps=STEPS)
    print(
        f"\nT {temperature}, {STEPS} steps a cut: " + str({k: f"{p:.2g}" for k, p in found.items()})
    )
    assert min(found.values()) > ALARM


@pytest.mark.parametrize("mutant", of_area("served draft distribution"), ids=NAME)
def test_a_wrong_step_is_caught(mutant: Mutant) -> None:
    """At each temperature and cut, with a fifth of the steps."""
    module = mutated(mutant)
    for temperature in TEMPERATURES:
        found = p_values(module, temperature, seed=2, steps=STEPS // 5)
        assert max(found.values()) < ALARM, f"T {temperature}: {found}"


def test_coins_are_finer_than_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A coin of 0, one in 2^24 in float32, keeps a draft of any probability."""
    seen: list[Tensor] = []

    def spied(**arguments: Any) -> Any:
        seen.extend((arguments["accept_uniforms"], arguments["bonus_uniforms"]))
        return accept_block(**arguments)

    monkeypatch.setattr(served, "sampled_rule", lambda: spied)
    two_tokens(served, 0.8, torch.Generator().manual_seed(0))
    assert len(seen) == 2
    for coins in seen:
        steps = coins.double() * 2.0**24
        assert bool((steps != steps.floor()).all())
        assert float(coins.min()) >= 0
        assert float(coins.max()) < 1
