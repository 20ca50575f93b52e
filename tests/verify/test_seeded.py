"""Test seeded sampling: MurmurHash3 noise, draws of the distribution, no effect of drafts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from sglang_dspark.verify import BatchSampling, target_distribution
from sglang_dspark.verify.seeded import accept_seeded, seeded_choice, waits

VOCAB = 12
GAMMA = 3
SETTINGS = {
    "temperature": {"temperature": 0.8},
    "top-k": {"temperature": 1.0, "top_k": 4},
    "top-p": {"temperature": 1.1, "top_p": 0.6},
    "min-p": {"temperature": 1.0, "min_p": 0.2},
}


def murmur3(data: bytes) -> int:
    """MurmurHash3 x86_32 over whole words, seed 0, from its published description."""
    state = 0
    for at in range(0, len(data), 4):
        word = int.from_bytes(data[at : at + 4], "little") * 0xCC9E2D51 & 0xFFFFFFFF
        word = (word << 15 | word >> 17) & 0xFFFFFFFF
        state ^= word * 0x1B873593 & 0xFFFFFFFF
        state = (state << 13 | state >> 19) & 0xFFFFFFFF
        state = (state * 5 + 0xE6546B64) & 0xFFFFFFFF
    state ^= len(data)
    state = (state ^ state >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    state = (state ^ state >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return state ^ state >> 16


def test_noise_is_murmur3_of_seed_position_and_token() -> None:
    assert murmur3(b"test") == 0xBA6BD213  # a published test vector
    seeds = torch.tensor([0, 42, -1, 2**62 + 5, -(2**63) + 7])
    positions = torch.tensor([0, 5, 77, 123_456, 2**31 - 1])
    tokens = torch.tensor([0, 1, 49_151])
    found = waits(seeds, positions, tokens)
    for n, i in itertools.product(range(5), range(3)):
        words = (int(seeds[n]) % 2**64).to_bytes(8, "little")
        words += int(positions[n]).to_bytes(4, "little") + int(tokens[i]).to_bytes(4, "little")
        assert float(found[n, i]) == pytest.approx(-math.log(murmur3(words) / (2**32 - 1)))


def _distribution(name: str, rows: int) -> torch.Tensor:
    logits = torch.randn(1, 1, VOCAB, generator=torch.Generator().manual_seed(3)) * 1.2
    return target_distribution(logits, BatchSampling.uniform(1, **SETTINGS[name]))[0].repeat(
        rows, 1
    )


def p_value(drawn: torch.Tensor, distribution: torch.Tensor) -> float:
    """p-value of drawn [N] against distribution [V]; 0 for a token of probability 0."""
    counts = torch.bincount(drawn, minlength=VOCAB).double()
    expected = distribution.double() * len(drawn)
    possible = expected > 0
    if int(counts[~possible].sum()):
        return 0.0
    statistic = ((counts - expected) ** 2 / expected)[possible].sum()
    freedom = torch.tensor((int(possible.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@pytest.mark.parametrize("name", sorted(SETTINGS))
@pytest.mark.parametrize("what", ["seeds", "positions"])
def test_draws_over_seeds_and_over_positions_follow_the_distribution(name: str, what: str) -> None:
    rows = 50_000
    distribution = _distribution(name, rows)
    many, one = torch.arange(rows), torch.full((rows,), 1234)
    pair = (many, one) if what == "seeds" else (one, many)
    drawn = seeded_choice(distribution, *pair)
    assert p_value(drawn, distribution[0]) > 1e-5
    tilted = distribution[0] ** 1.3 / (distribution[0] ** 1.3).sum()
    assert p_value(drawn, tilted) < 1e-9


def test_draws_at_neighbouring_positions_are_independent() -> None:
    rows = 40_000
    distribution = torch.full((rows, 4), 0.25)
    seeds = torch.arange(rows)
    first = seeded_choice(distribution, seeds, torch.full((rows,), 10))
    second = seeded_choice(distribution, seeds, torch.full((rows,), 11))
    counts = torch.bincount(first * 4 + second, minlength=16).double()
    statistic = ((counts - rows / 16) ** 2 / (rows / 16)).sum()
    assert float(torch.special.gammaincc(torch.tensor(7.5).double(), statistic / 2)) > 1e-5


def _chain(table: torch.Tensor, seed: int, drafts: torch.Tensor | None, lens: int) -> list[int]:
    """Return twenty tokens of a seeded chain with the table [V, V], drafts verified or none."""
    tokens, seeds = [0], torch.tensor([seed])
    while len(tokens) < 20:
        position = len(tokens) - 1
        if drafts is None:
            row = table[tokens[-1]][None]
            tokens.append(int(seeded_choice(row, seeds, torch.tensor([position]))))
            continue
        block = drafts[position % len(drafts)][None]  # [1, gamma]
        probs = table[torch.cat([torch.tensor([[tokens[-1]]]), block], 1)]  # [1, gamma + 1, V]
        done = accept_seeded(block, probs, seeds, torch.tensor([position]), torch.tensor([lens]))
        tokens += [*block[0, : int(done.accepted)].tolist(), int(done.bonus)]
    return tokens[:20]


def test_output_is_plain_seeded_decoding_for_any_drafts() -> None:
    generator = torch.Generator().manual_seed(1)
    table = torch.softmax(torch.randn(VOCAB, VOCAB, generator=generator), -1)
    drafts = torch.randint(0, VOCAB, (7, GAMMA), generator=generator)
    for seed in range(16):
        plain = _chain(table, seed, None, 0)
        # Drafts that are partly right: the plain continuation with a wrong token now and then.
        right = torch.tensor([(plain * 2)[i + 1 : i + 1 + GAMMA] for i in range(20)])
        right[seed % 20, seed % GAMMA] += 1
        right %= VOCAB
        for lens in range(GAMMA + 1):
            assert _chain(table, seed, drafts, lens) == plain
            assert _chain(table, seed, right, lens) == plain
    assert len({tuple(_chain(table, seed, None, 0)) for seed in range(16)}) > 12


def test_drafts_with_the_same_noise_agree_as_often_as_promised() -> None:
    rows = 20_000
    generator = torch.Generator().manual_seed(2)
    target, drafter = torch.softmax(torch.randn(2, VOCAB, generator=generator), -1)
    seeds, positions = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    tokens = torch.arange(VOCAB)
    draft = (waits(seeds, positions, tokens) / drafter).argmin(1)
    choice = seeded_choice(target.expand(rows, -1), seeds, positions)
    distance = float((target - drafter).abs().sum() / 2)
    agree = float((draft == choice).double().mean())
    assert agree >= (1 - distance) / (1 + distance) - 0.02
    assert agree > float((target * drafter).sum()) + 0.1  # independent noise agrees by chance
