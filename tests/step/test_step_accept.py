"""The step's accept rule over whole windows: distribution by chi-square, rules by the CPU's.

Chains, cuts and statistics are those of tests/backends/cpu/test_accept_distribution.py; behind a
window's verified rows stands what must not be read.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")

from sglang_dspark.backends.cpu.accept import accept as accept_packed
from sglang_dspark.step import accept as step_accept
from sglang_dspark.step.seeds import Seeds
from sglang_dspark.verify import accept_sampled
from sglang_dspark.verify.sampling import BatchSampling, sampled_distribution, target_distribution
from tests.backends.cpu import test_accept_distribution as packed
from tests.backends.cpu.draft_world import ALL, settings
from tests.mutants.catalogue import of_area
from tests.mutants.mutant import NAME, Mutant
from tests.rehearsal import reads
from tests.step.accept_rule import configured

STEPS = 60_000  # of each temperature and cut
V, GAMMA = packed.V, packed.GAMMA


def in_windows(module: ModuleType) -> Any:
    """Adapt the accept rule over whole windows to `p_values`."""

    def accept(
        window: Tensor,
        lens: Tensor,
        starts: Tensor,
        rows: Tensor,
        block: Any,
        info: Any,
        at: Tensor,
    ) -> tuple[Tensor, Tensor]:
        whole = spread(rows, lens, window.shape[1])
        done = module.accept(window, lens, whole, block, needing(info), at, None)
        return done.accepted, done.bonus

    return SimpleNamespace(accept=accept)


def spread(rows: Tensor, lens: Tensor, width: int) -> Tensor:
    """Packed rows [B, V] in windows [R * width, V]; rows that were not verified are NaN."""
    whole = torch.full((len(lens), width, rows.shape[1]), torch.nan)
    whole[torch.arange(width)[None, :] < lens[:, None]] = rows
    return whole.view(len(lens) * width, -1)


def needing(info: Any) -> Any:
    """With the flags that SGLang keeps beside the settings."""
    info.need_top_k_sampling = bool((info.top_ks < ALL).any())
    info.need_top_p_sampling = bool((info.top_ps < 1).any())
    info.need_min_p_sampling = bool((info.min_ps > 0).any())
    return info


@pytest.fixture(params=["block", "token"])
def rule(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[str]:
    """Configured for the test."""
    with configured(step_accept, request.param, tmp_path, monkeypatch):
        yield request.param


def test_the_configured_rule_accepts(rule: str) -> None:
    assert (step_accept.sampled_rule() is accept_sampled) == (rule == "token")


@pytest.mark.parametrize("temperature", packed.TEMPERATURES)
def test_two_tokens_follow_the_target(temperature: float, rule: str) -> None:
    found = packed.p_values(in_windows(step_accept), temperature, seed=5, steps=STEPS)
    assert min(found.values()) > packed.ALARM, found


@pytest.mark.parametrize("mutant", of_area("step distribution"), ids=NAME)
def test_a_wrong_step_is_caught(mutant: Mutant) -> None:
    source = mutant.applied(inspect.getsource(step_accept))
    module = ModuleType("mutated")
    exec(compile(source, "mutated", "exec"), module.__dict__)
    caught = [
        min(packed.p_values(in_windows(module), temperature, seed=6, steps=STEPS // 2).values())
        for temperature in packed.TEMPERATURES
    ]
    assert max(caught) < packed.ALARM, caught


def test_every_cut_alone_and_a_chunk_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with and without cuts in one batch, in pieces that end inside a window."""
    monkeypatch.setattr(step_accept, "_AT_ONCE", 2 * V)
    cuts = [*packed.CUTS.values(), (1, 1.0, 0.0)]
    temperature = torch.tensor([0.7, 1.0, 1.3, 0.9, 1.1, 1.0])
    top_k, top_p, min_p = (torch.tensor(each) for each in zip(*cuts, strict=True))
    logits = torch.randn(len(cuts), 3, V, generator=torch.Generator().manual_seed(0)) * 2
    found = step_accept.target_probs(
        logits.view(-1, V), needing(settings(temperature, top_k, top_p, min_p)), 3
    )
    expected = target_distribution(logits, BatchSampling(temperature, top_k, top_p, min_p))
    assert torch.allclose(found.view(len(cuts), 3, V), expected, atol=1e-6)
    assert torch.equal(found.view(expected.shape) > 0, expected > 0)


def test_the_last_tokens_stay_where_nothing_is_cut() -> None:
    """Of 40,000 probabilities the rounded sum exceeds 1 long before the end."""
    logits = torch.randn(1, 40_000, generator=torch.Generator().manual_seed(0)) * 3
    ordered = logits.softmax(-1).sort(descending=True).values
    assert int((ordered.cumsum(1) - ordered > 1).sum()) > 100
    cuts = torch.tensor([ALL]), torch.ones(1), torch.zeros(1)
    assert bool((sampled_distribution(logits, torch.ones(1), cuts) > 0).all())


def batch(requests: int, generator: torch.Generator) -> tuple[Any, ...]:
    """Windows, lengths, logits, drafts and settings in which every third request is greedy."""
    temperature = torch.tensor([0.0, 0.8, 1.2]).repeat(requests)[:requests]
    info = needing(settings(temperature, min_ps=torch.full((requests,), 0.02)))
    window = torch.randint(0, V, (requests, GAMMA + 1), generator=generator)
    lens = torch.randint(1, GAMMA + 2, (requests,), generator=generator)
    rows = torch.randn(int(lens.sum()), V, generator=generator)
    block = SimpleNamespace(
        greedy_draft=False,
        corrected_logits=torch.randn(requests, GAMMA, V, generator=generator),
        temperatures=torch.where(temperature > 0, temperature, 1.0),
        greedy_mask=temperature == 0,
    )
    return window, lens, rows, block, info


def test_seeded_and_greedy_requests_get_the_cpus_tokens() -> None:
    """Right drafts, wrong ones and cut ones; unseeded requests stand between."""
    requests, generator = 300, torch.Generator().manual_seed(2)
    window, lens, rows, block, info = batch(requests, generator)
    anchors = torch.randint(0, 5000, (requests,), generator=generator)
    own = torch.randint(-(2**62), 2**62, (requests,), generator=generator)
    places = [r for r in range(requests) if r % 3 and r % 4]
    seeds = Seeds(torch.tensor(places), own[places])
    fixed = [r for r in range(requests) if r % 3 == 0 or r in places]
    starts, whole = lens.cumsum(0) - lens, spread(rows, lens, GAMMA + 1)
    for _ in range(GAMMA + 1):
        accepted, bonus = accept_packed(window, lens, starts, rows, block, info, anchors, seeds)
        found = step_accept.accept(window, lens, whole, block, info, anchors, seeds)
        assert torch.equal(found.accepted[fixed], accepted[fixed].long())
        assert torch.equal(found.bonus[fixed], bonus[fixed])
        # The next round's drafts are right one place further.
        more = accepted + 1 < lens
        window[more, accepted[more] + 1] = bonus[more]
    assert int((accepted[fixed] + 1 == lens[fixed]).sum()) == len(fixed)


def test_requests_without_a_seed_draw_anew_beside_one_with_a_seed() -> None:
    window, lens, rows, block, info = batch(30, torch.Generator().manual_seed(3))
    whole, anchors = spread(rows, lens, GAMMA + 1), torch.arange(30)
    seeds = Seeds(torch.tensor([1]), torch.tensor([5]))
    first, second = (
        step_accept.accept(window, lens, whole, block, info, anchors, seeds) for _ in range(2)
    )
    assert int(first.bonus[1]) == int(second.bonus[1])
    free = [r for r in range(30) if r % 3 and r != 1]
    assert not torch.equal(first.bonus[free], second.bonus[free])


def test_nothing_is_read_on_the_host(rule: str) -> None:
    requests, generator = 30, torch.Generator().manual_seed(6)
    window, lens, rows, block, info = batch(requests, generator)
    anchors, places = torch.arange(requests), torch.arange(1, requests, 3)
    info.is_any_greedy = True
    step = (window, lens, spread(rows, lens, GAMMA + 1), block, info, anchors)
    for seeds in (None, Seeds(places, places)):
        for block.greedy_draft in (False, True):
            with reads.watched() as seen:
                step_accept.accept(*step, seeds)
            assert seen == []
