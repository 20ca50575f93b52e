"""Chi-square of sampled steps with confidence-chosen windows: lossless, and four mutants fail.

100,000 steps a case in every run, a million with `pytest --slow tests/schedule/test_chi_square.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_dspark.verify import BatchSampling, accept_block
from tests.schedule.sampled_steps import Case, p_value
from tests.verify import mutants

ALPHA = 1e-4  # of a false alarm anywhere in the family, after Holm
CAUGHT = 1e-12
FEW, MANY = 100_000, 1_000_000


def uniform(temperature: float = 1.0, **cuts: float) -> BatchSampling:
    return BatchSampling.uniform(1, temperature, **cuts)  # type: ignore[arg-type]


CASES: dict[str, Case] = {
    **{f"gamma {g}, T 0.8": Case(g, uniform(0.8)) for g in range(1, 8)},
    **{f"gamma {g}, greedy drafts": Case(g, uniform(1.0), argmax=True) for g in (1, 2, 4, 7)},
    **{f"gamma {g}, random windows": Case(g, uniform(), share=None) for g in (2, 5, 7)},
    "gamma 2, top-k 3": Case(2, uniform(top_k=3)),
    "gamma 5, top-k 2, few admitted": Case(5, uniform(top_k=2), share=0.25),
    "gamma 3, top-p 0.8": Case(3, uniform(1.2, top_p=0.8)),
    "gamma 6, top-p 0.9, many admitted": Case(6, uniform(top_p=0.9), share=0.8),
    "gamma 1, min-p 0.2": Case(1, uniform(min_p=0.2)),
    "gamma 4, min-p 0.1": Case(4, uniform(min_p=0.1)),
    "gamma 3, top-k 4, top-p 0.9, min-p 0.05": Case(3, uniform(top_k=4, top_p=0.9, min_p=0.05)),
    "gamma 4, T 1.5": Case(4, uniform(1.5)),
    "gamma 3, greedy drafts, top-k 3": Case(3, uniform(top_k=3), argmax=True),
    "gamma 7, few admitted": Case(7, uniform(), share=0.1),
    **{f"block, gamma {g}, T 0.8": Case(g, uniform(0.8), rule=accept_block) for g in (2, 4, 7)},
    "block, gamma 5, random windows": Case(5, uniform(), share=None, rule=accept_block),
    "block, gamma 4, T 1.5": Case(4, uniform(1.5), rule=accept_block),
    "block, gamma 3, top-k 3": Case(3, uniform(top_k=3), rule=accept_block),
    "block, gamma 5, top-p 0.8": Case(5, uniform(1.2, top_p=0.8), rule=accept_block),
    "block, gamma 4, min-p 0.1": Case(4, uniform(min_p=0.1), rule=accept_block),
    **{f"estimated, gamma {g}": Case(g, uniform(0.8), estimate=True) for g in (1, 3, 7)},
    "estimated, greedy drafts": Case(4, uniform(), argmax=True, estimate=True),
    "estimated, block, gamma 4": Case(4, uniform(), estimate=True, rule=accept_block),
    "block, gamma 6, all cuts": Case(
        6, uniform(top_k=4, top_p=0.9, min_p=0.05), share=0.8, rule=accept_block
    ),
}

MUTANTS: dict[str, Case] = {
    "residual skipped": Case(3, rule=mutants.residual_skipped),
    "argmax draft treated as sampled": Case(3, argmax=True, claim_sampled=True),
    "bonus off by one": Case(3, rule=mutants.bonus_off_by_one),
    "future-peeking admission": Case(3, peek=True),
}


def holm(values: dict[str, float], alpha: float) -> list[str]:
    """Names whose hypothesis Holm's procedure rejects, all false alarms together at most alpha."""
    rejected = []
    for i, name in enumerate(sorted(values, key=values.__getitem__)):
        if values[name] > alpha / (len(values) - i):
            break
        rejected.append(name)
    return rejected


def test_holm_rejects_in_order() -> None:
    values = {"a": 0.04, "b": 0.001, "c": 0.02, "d": 0.9}
    assert holm(values, 0.05) == ["b"]  # .02 > .05 / 3, and what is behind it stays too
    assert holm(values, 0.07) == ["b", "c"]
    assert holm({"a": 0.06}, 0.05) == []


@pytest.mark.parametrize("steps", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_distribution_is_the_targets_in_every_case(steps: int) -> None:
    assert len(CASES) >= 20
    values = {name: p_value(case, steps) for name, case in CASES.items()}
    assert holm(values, ALPHA) == []
    assert min(values.values()) < 0.5 < max(values.values())  # a statistic stuck at 0 or 1 shows


@pytest.mark.parametrize("steps", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_mutant_is_caught(name: str, steps: int) -> None:
    assert p_value(MUTANTS[name], steps) < CAUGHT


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_mutant_without_its_mistake_is_not_caught(name: str) -> None:
    """Positive control: the same settings, the mistake taken back."""
    honest = replace(MUTANTS[name], rule=Case(1).rule, claim_sampled=False, peek=False)
    assert p_value(honest, FEW) > ALPHA
