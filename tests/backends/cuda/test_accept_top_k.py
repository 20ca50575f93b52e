"""The top-k route: the tokens of `step.accept` for the same uniforms, and plain decoding's
distribution by chi-square, which wrong rules must fail."""

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

from sglang_dspark.backends.cuda import accept_top_k as route
from sglang_dspark.step import accept as step_accept
from sglang_dspark.step.seeds import Seeds
from sglang_dspark.verify import BatchSampling, candidates, target_distribution
from sglang_dspark.verify.candidates import equal_tokens
from tests.backends.cpu.test_accept_distribution import ALARM, chi_square
from tests.mutants.catalogue import of_area
from tests.mutants.mutant import NAME, Mutant
from tests.rehearsal import reads
from tests.step.accept_rule import configured

V, GAMMA = 40, 2
CUT = (20, 0.95, 0.0)  # Qwen3's own
TEMPERATURE = 0.6
BATCH, STEPS = 50_000, 150_000


@pytest.fixture(params=["block", "token"])
def rule(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[str]:
    with configured(step_accept, request.param, tmp_path, monkeypatch):
        yield request.param


def odd_step(seed: int) -> tuple[tuple[Any, ...], int, int]:
    """Arguments of `step_accept.accept`, the largest top-k, and a bound of the verified rows.

    Ties of all kinds, small vocabularies, every cut, greedy and seeded requests, drafts that the
    target never draws, argmax drafts; what was not verified is NaN in every second step.
    """
    rng = torch.Generator().manual_seed(seed)

    def one_of(choices: Any, count: int) -> Tensor:
        return torch.tensor(choices)[torch.randint(len(choices), (count,), generator=rng)]

    requests, gamma, vocab = (int(one_of(each, 1)) for each in (range(1, 7), range(1, 6), (3, 7, 65, 300)))  # fmt: skip # noqa: E501
    lens = torch.randint(1, gamma + 2, (requests,), generator=rng)
    logits = torch.randn(requests, gamma + 1, vocab, generator=rng) * 2
    drafted = torch.randn(requests, gamma, vocab, generator=rng) * 2
    if seed % 5 == 1:
        logits, drafted = logits.round(), drafted.round()
    elif seed % 5 == 2:
        logits = (logits * 2).round() / 2
    elif seed % 5 == 3:
        logits = logits[:, :, :1].expand(-1, -1, vocab).clone()
    elif seed % 5 == 4:
        logits = logits.bfloat16().float()
        drafted = logits[:, :-1] + 0.1 * drafted
    tokens = drafted.softmax(-1).flatten(0, 1).multinomial(1, generator=rng).view(requests, gamma)
    if seed % 3 == 0:
        tokens = torch.randint(0, vocab, tokens.shape, generator=rng)
    greedy = torch.rand(requests, generator=rng) < 0.3
    temperature = torch.where(greedy, 1.0, torch.rand(requests, generator=rng) + 0.4)
    top_k = torch.where(greedy, 1, one_of((1, 2, 3, 5, vocab, vocab + 9, 1024), requests)).int()
    info = SimpleNamespace(
        temperatures=temperature[:, None],
        top_ks=top_k,
        top_ps=one_of((1.0, 1.0, 0.95, 0.6, 0.1), requests),
        min_ps=one_of((0.0, 0.0, 0.05, 0.4), requests),
        need_top_k_sampling=True,
        need_top_p_sampling=True,
        need_min_p_sampling=True,
        is_any_greedy=bool(greedy.any()),
    )
    block = SimpleNamespace(
        greedy_draft=seed % 7 == 0,
        corrected_logits=drafted,
        temperatures=torch.rand(requests, generator=rng) + 0.5,
        greedy_mask=greedy,
    )
    if seed % 2:
        logits[torch.arange(gamma + 1)[None, :] >= lens[:, None]] = torch.nan
    seeded = torch.nonzero(~greedy & (torch.rand(requests, generator=rng) < 0.4))[:, 0]
    values = torch.randint(-(2**62), 2**62, seeded.shape, generator=rng)
    seeds = Seeds(seeded, values) if len(seeded) else None
    ids = torch.nn.functional.pad(tokens, (1, 0))
    anchors = torch.randint(0, 99, (requests,), generator=rng)
    step = ids, lens, logits.view(-1, vocab), block, info, anchors, seeds
    return step, int(top_k.max()), int(lens.sum()) + seed % 4


def test_the_tokens_are_those_of_whole_rows(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    different, rejected, emitted = [], 0, 0
    for seed in range(600):
        step, most, rows = odd_step(seed)
        monkeypatch.setattr(route, "_CHUNK", 3000 if seed % 11 == 0 else 200 << 20)
        torch.manual_seed(seed)
        expected = step_accept.accept(*step)
        torch.manual_seed(seed)
        found = route.accept_top_k(*step, most=most, rows=rows, rule=rule)
        same = torch.equal(found.accepted, expected.accepted)
        if not (same and torch.equal(found.bonus, expected.bonus)):
            different.append(seed)
        rejected += int((found.accepted + 1 < step[1]).sum())
        emitted += int(found.accepted.sum())
    assert different == []
    assert rejected > 300
    assert emitted > 300


@pytest.mark.parametrize(("vocab", "most"), [(1000, 20), (151_936, 1024)])
def test_a_chunk_of_rows_takes_up_to_200_mib(vocab: int, most: int) -> None:
    """13 bytes of each logit and 330 of each candidate."""
    parts: list[slice] = []

    def listed(part: slice) -> tuple[Tensor, ...]:
        parts.append(part)
        return (torch.arange(part.start, min(part.stop, 12_000)),)

    (rows,) = route._in_chunks(listed, 12_000, vocab, most)
    assert torch.equal(rows, torch.arange(12_000))
    size, together = 13 * vocab + 330 * most, parts[0].stop
    assert together * size <= 200 * 2**20 < (together + 1) * size


def test_a_row_larger_than_a_chunk_is_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "_CHUNK", 1)
    (rows,) = route._in_chunks(lambda part: (torch.tensor([part.stop - part.start]),), 3, 10, 10)
    assert rows.tolist() == [1, 1, 1]


def test_rules_differ() -> None:
    """Or the comparison above would not tell which one ran."""
    outcomes = []
    for rule in ("block", "token"):
        accepted = 0
        for seed in range(4, 300, 5):
            step, most, rows = odd_step(seed)
            torch.manual_seed(seed)
            accepted += int(
                route.accept_top_k(*step, most=most, rows=rows, rule=rule).accepted.sum()
            )
        outcomes.append(accepted)
    assert outcomes[0] > outcomes[1]


def test_a_row_that_is_nan_becomes_a_token_that_exists() -> None:
    step, most, rows = odd_step(3)
    step[2].fill_(torch.nan)
    found = route.accept_top_k(*step, most=most, rows=rows, rule="block")
    assert bool(((found.bonus >= 0) & (found.bonus < step[2].shape[1])).all())


def test_nothing_is_read_on_the_host(rule: str) -> None:
    for seed in range(40):
        step, most, rows = odd_step(seed)
        step[4].is_any_greedy = True
        with reads.watched() as seen:
            route.accept_top_k(*step, most=most, rows=rows, rule=rule)
        assert seen == []


def test_the_lowest_of_equal_tokens_are_found() -> None:
    rng = torch.Generator().manual_seed(0)
    probs = torch.randint(0, 4, (50, 333), generator=rng).float()
    value = torch.ones(50, 1)
    found = equal_tokens(probs, value, torch.arange(1, 41).expand(50, 40))
    for row, tokens in zip(probs, found, strict=True):
        assert tokens.tolist() == torch.nonzero(row == 1)[:40, 0].tolist()


def test_a_top_p_of_1_cuts_nothing() -> None:
    """Of 1,024 probabilities the rounded sum exceeds 1 long before the end."""
    logits = torch.randn(1, 1024, generator=torch.Generator().manual_seed(0)) * 5
    ordered = logits.softmax(-1).sort(descending=True).values
    assert int((ordered.cumsum(1) - ordered > 1).sum()) > 100
    ones = torch.ones(1)
    found = candidates.top_candidates(logits, ones, 1024 * ones.int(), ones, 0 * ones, 1024)
    assert found.tokens.tolist() == [list(range(1024))]
    assert bool((found.probs > 0).all())


@pytest.mark.parametrize("width", [1, 4])
def test_windows_are_packed_without_gaps(width: int) -> None:
    lengths = torch.tensor([1, 0, 3, 0]).clamp(max=width)
    total = int(lengths.sum())
    found = route.packed(lengths, width, total + 2)
    places = [(r, i) for r, length in enumerate(lengths.tolist()) for i in range(length)]
    assert list(zip(found.request.tolist(), found.place.tolist(), strict=True))[:total] == places
    for at, (r, i) in enumerate(places):
        assert int(found.row[r, i]) == at


def table(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 1.2


# Logits behind each last token. Rows are flat and peaked in turn: of flat ones top-k drops a third
# of the mass, of peaked ones top-p decides.
TARGET = table(1, V, V) * torch.tensor([0.15, 1.0]).repeat(V // 2)[:, None]
DRAFT = table(2, V, V)


def p_value(module: ModuleType, rule: str, seed: int, steps: int) -> float:
    """Chi-square p-value of the first two tokens of a step, drafts drawn uncut."""
    torch.manual_seed(seed)
    target = target_distribution(TARGET[None], BatchSampling.uniform(1, TEMPERATURE, *CUT))[
        0
    ].double()
    proposals = (DRAFT / TEMPERATURE).softmax(-1)
    counts = torch.zeros(V * V, dtype=torch.float64)
    ones = torch.ones(BATCH)
    info = SimpleNamespace(
        temperatures=TEMPERATURE * ones[:, None],
        top_ks=CUT[0] * ones.int(),
        top_ps=CUT[1] * ones,
        min_ps=0 * ones,
        is_any_greedy=False,
    )
    for _ in range(-(-steps // BATCH)):
        ids = torch.zeros(BATCH, GAMMA + 1, dtype=torch.int64)
        for i in range(GAMMA):
            ids[:, i + 1] = proposals[ids[:, i]].multinomial(1)[:, 0]
        lens = torch.randint(1, GAMMA + 2, (BATCH,))
        block = SimpleNamespace(
            greedy_draft=False,
            corrected_logits=DRAFT[ids[:, :-1]],
            temperatures=TEMPERATURE * ones,
            greedy_mask=ones < 0,
        )
        step = ids, lens, TARGET[ids].view(-1, V), block, info, lens, None
        found = module.accept_top_k(*step, most=CUT[0], rows=int(lens.sum()), rule=rule)
        first = torch.where(found.accepted > 0, ids[:, 1], found.bonus)
        then = torch.where(found.accepted > 1, ids[:, 2], found.bonus)
        after = target[first].multinomial(1)[:, 0]  # by the target where the step ended
        counts += torch.bincount(
            first * V + torch.where(found.accepted > 0, then, after), minlength=V * V
        )
    return chi_square(counts, (target[0][:, None] * target).flatten() * counts.sum())


@pytest.mark.parametrize("judged", ["block", "token"])
def test_two_tokens_follow_plain_decoding(judged: str) -> None:
    """top-k 20, top-p 0.95, temperature 0.6; 150,000 steps."""
    assert p_value(route, judged, seed=1, steps=STEPS) > ALARM


@pytest.mark.parametrize("judged", ["block", "token"])
@pytest.mark.parametrize("mutant", of_area("listed distribution"), ids=NAME)
def test_a_wrong_rule_is_caught(mutant: Mutant, judged: str) -> None:
    wrong = mutated(mutant)
    assert p_value(wrong, judged, seed=2, steps=STEPS) < ALARM


def mutated(mutant: Mutant) -> ModuleType:
    """The route with one piece of its source, or of the candidates', exchanged."""
    modules = {"candidates": candidates, "accept_top_k": route}
    found: dict[str, ModuleType] = {}
    for name, module in modules.items():
        source = inspect.getsource(module)
        if mutant.file.endswith(f"/{name}.py"):
            source = mutant.applied(source)
        found[name] = ModuleType(name)
        exec(compile(source, name, "exec"), found[name].__dict__)
    found["accept_top_k"].__dict__["top_candidates"] = found["candidates"].top_candidates
    return found["accept_top_k"]
