"""Compare target probabilities of verified rows with SGLang's sampler, cuts and ties included."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sglang_dspark.backends.cpu.accept import accept, build_target_probs, sampling_probs
from sglang_dspark.verify import sample_inverse_cdf

VOCAB = 12
ALL = 1 << 30  # SGLang's top-k of those who want all
# (temperature, top_k, top_p, min_p)
SETTINGS = {
    "plain": (0.8, ALL, 1.0, 0.0),
    "top_k": (1.0, 4, 1.0, 0.0),
    "top_p": (1.2, ALL, 0.7, 0.0),
    "min_p": (1.1, ALL, 1.0, 0.25),
    "top_k and top_p": (1.0, 4, 0.7, 0.0),
    "all three": (1.3, 6, 0.7, 0.1),
}


def info(*requests: tuple[float, int, float, float]) -> SimpleNamespace:
    """Build the `SamplingBatchInfo` fields that the accept path reads."""
    temperature, top_k, top_p, min_p = zip(*requests, strict=True)
    return SimpleNamespace(
        temperatures=torch.tensor(temperature)[:, None],
        top_ks=torch.tensor(top_k, dtype=torch.int32),
        top_ps=torch.tensor(top_p),
        min_ps=torch.tensor(min_p),
        need_top_k_sampling=any(k < ALL for k in top_k),
        need_top_p_sampling=any(p < 1 for p in top_p),
        need_min_p_sampling=any(p > 0 for p in min_p),
        is_all_greedy=False,
        is_any_greedy=False,
        sampling_seed=None,
    )


def sampler_distribution(logits: Tensor, setting: tuple[float, int, float, float]) -> Tensor:
    """Return the filtered weights that SGLang's plain sampler draws from, by token id."""
    from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

    temperature, top_k, top_p, min_p = setting
    rows = len(logits)
    _, weights, order, _ = top_k_top_p_min_p_sampling_from_probs_torch(
        torch.softmax(logits / temperature, -1),
        torch.full((rows,), top_k, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
        min_p > 0,
        None,
        torch.zeros(rows, dtype=torch.int64),
        return_filtered_probs=True,
    )
    distribution = torch.zeros_like(weights).scatter_(1, order.long(), weights)
    return distribution / distribution.sum(-1, keepdim=True)


def logits(rows: int, seed: int) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_distribution_is_the_samplers(name: str) -> None:
    rows = logits(200, seed=0)
    expected = sampler_distribution(rows, SETTINGS[name])
    assert torch.allclose(sampling_probs(rows, info(SETTINGS[name]), 200), expected, atol=1e-6)
    windows = build_target_probs(
        next_token_logits=rows,
        sampling_info=info(*[SETTINGS[name]] * 50),
        draft_token_num=4,
        bs=50,
    )
    assert torch.allclose(windows.view(200, -1), expected, atol=1e-6)


def test_each_request_has_its_own_settings_and_rows() -> None:
    names, lens = sorted(SETTINGS), torch.tensor([3, 1, 2, 4, 1, 2])
    rows = logits(int(lens.sum()), seed=1)
    found = sampling_probs(rows, info(*[SETTINGS[name] for name in names]), lens).split(
        lens.tolist()
    )
    for name, part, distribution in zip(names, rows.split(lens.tolist()), found, strict=True):
        assert torch.allclose(distribution, sampler_distribution(part, SETTINGS[name]), atol=1e-6)


STEPS = 20_000
ALARM = 1e-6  # one false alarm in a million cases; the mutant lands far below


def first_token_p_value(name: str, *, upstream: bool) -> float:
    """Chi-square of the first token of ragged sampled steps against the sampler's distribution."""
    from sglang_dspark.backends.cpu import accept as module

    setting, gamma = SETTINGS[name], 2
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(4)
    table = logits(VOCAB + 1, seed=5)  # behind each last token; row V is the start
    heads = logits(VOCAB + 1, seed=6)
    block, last = [], torch.full((STEPS,), VOCAB)
    corrected = []
    for _ in range(gamma):
        corrected.append(heads[last])
        distribution = torch.softmax(corrected[-1] / setting[0], -1)
        last = sample_inverse_cdf(distribution, torch.rand(STEPS, generator=generator))
        block.append(last)
    drafts = torch.stack(block, 1)
    lens = torch.randint(1, gamma + 2, (STEPS,), generator=generator)
    window = torch.cat([torch.full((STEPS, 1), VOCAB), drafts], 1)
    inside = torch.arange(gamma + 1)[None, :] < lens[:, None]
    starts = lens.cumsum(0) - lens
    draft_block = SimpleNamespace(
        greedy_draft=False,
        corrected_logits=torch.stack(corrected, 1),
        temperatures=torch.full((STEPS,), setting[0]),
    )
    kept = module.sampling_probs
    if upstream:
        module.sampling_probs = _upstream_distribution
    try:
        accepted, bonus = accept(
            window, lens, starts, table[window[inside]], draft_block, info(*[setting] * STEPS), lens
        )
    finally:
        module.sampling_probs = kept
    first = torch.where(accepted > 0, drafts[:, 0], bonus)
    counts = torch.bincount(first, minlength=VOCAB).double()
    expected = sampler_distribution(table[VOCAB:], setting)[0].double() * STEPS
    possible = expected > 0
    if int(counts[~possible].sum()):
        return 0.0
    statistic = ((counts - expected) ** 2 / expected)[possible].sum()
    freedom = torch.tensor((int(possible.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


def _upstream_distribution(rows: Tensor, sampling_info: SimpleNamespace, lens: Tensor) -> Tensor:
    """The mutant: SGLang's own function for verified rows."""
    import inspect

    from sglang.srt.speculative import dflash_utils

    theirs = inspect.unwrap(dflash_utils.build_speculative_verify_target_probs)
    by_row = {
        name: getattr(sampling_info, name).repeat_interleave(lens, 0)
        for name in ("temperatures", "top_ks", "top_ps")
    }
    needs = {
        name: getattr(sampling_info, name)
        for name in ("need_top_k_sampling", "need_top_p_sampling")
    }
    return theirs(
        next_token_logits=rows,
        sampling_info=SimpleNamespace(**by_row, **needs),
        draft_token_num=1,
        bs=len(rows),
    )[:, 0]


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_ragged_sampling_keeps_the_samplers_distribution(name: str) -> None:
    assert first_token_p_value(name, upstream=False) > ALARM


@pytest.mark.parametrize("name", ["min_p", "top_k and top_p", "all three"])
def test_upstreams_distribution_of_verified_rows_is_caught(name: str) -> None:
    assert first_token_p_value(name, upstream=True) < 1e-12
