"""Properties of the accept rules and the truncated distribution."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sglang_dspark.verify import (
    Acceptance,
    BatchSampling,
    accept_greedy,
    accept_sampled,
    sample_inverse_cdf,
    target_distribution,
)
from sglang_dspark.verify import sampling as sampling_module

seeds = st.integers(0, 2**32 - 1)
EXAMPLES = settings(max_examples=60, deadline=None)


def _probs(generator: torch.Generator, *shape: int, sparse: bool = False) -> Tensor:
    weights = torch.rand(*shape, generator=generator)
    if sparse:
        weights = weights * (torch.rand(*shape, generator=generator) < 0.5)
        weights[..., 0] += 1e-3
    return weights / weights.sum(-1, keepdim=True)


@EXAMPLES
@given(seed=seeds, rows=st.integers(1, 4), gamma=st.integers(0, 5), vocab=st.integers(2, 9))
def test_one_hot_target_is_the_greedy_rule(seed: int, rows: int, gamma: int, vocab: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    argmax = torch.randint(0, vocab, (rows, gamma + 1), generator=generator)
    draft = torch.randint(0, vocab, (rows, gamma), generator=generator)
    lens = torch.randint(0, gamma + 1, (rows,), generator=generator)
    one_hot = torch.nn.functional.one_hot(argmax, vocab).float()
    uniforms = torch.rand(rows, gamma, generator=generator), torch.rand(rows, generator=generator)
    greedy = accept_greedy(draft, argmax, lens)
    for draft_probs in (None, _probs(generator, rows, gamma, vocab)):
        sampled = accept_sampled(draft, draft_probs, one_hot, *uniforms, lens)
        assert torch.equal(sampled.accepted, greedy.accepted)
        assert torch.equal(sampled.bonus, greedy.bonus)


@EXAMPLES
@given(seed=seeds, gamma=st.integers(1, 5), vocab=st.integers(2, 9))
def test_emitted_tokens_have_target_mass(seed: int, gamma: int, vocab: int) -> None:
    """For any drafts, a token that the target excludes is never emitted."""
    generator = torch.Generator().manual_seed(seed)
    rows = 5
    target = _probs(generator, rows, gamma + 1, vocab, sparse=True)
    proposal = _probs(generator, rows, gamma, vocab)
    draft = torch.randint(0, vocab, (rows, gamma), generator=generator)
    lens = torch.randint(0, gamma + 1, (rows,), generator=generator)
    uniforms = torch.rand(rows, gamma, generator=generator), torch.rand(rows, generator=generator)
    outcome = accept_sampled(draft, proposal, target, *uniforms, lens)
    assert bool((outcome.accepted <= lens).all())
    mass = target.gather(2, outcome.tokens(draft)[:, :, None])[:, :, 0]
    emitted = torch.arange(gamma + 1)[None] < outcome.emitted[:, None]
    assert bool((mass[emitted] > 0).all())


@EXAMPLES
@given(seed=seeds, rows=st.integers(1, 6), gamma=st.integers(0, 5))
def test_longer_windows_only_extend(seed: int, rows: int, gamma: int) -> None:
    """Verdicts inside a window do not depend on its length."""
    generator = torch.Generator().manual_seed(seed)
    target, proposal = _probs(generator, rows, gamma + 1, 5), _probs(generator, rows, gamma, 5)
    draft = torch.randint(0, 5, (rows, gamma), generator=generator)
    uniforms = torch.rand(rows, gamma, generator=generator), torch.rand(rows, generator=generator)
    full = accept_sampled(draft, proposal, target, *uniforms)
    for length in range(gamma + 1):
        lens = torch.full((rows,), length)
        cut = accept_sampled(draft, proposal, target, *uniforms, lens)
        assert torch.equal(cut.accepted, full.accepted.clamp(max=length))


def test_empty_residual_falls_back_to_the_target() -> None:
    """p_t <= p_d everywhere by rounding, draft rejected: the target's distribution is used."""
    proposal = torch.tensor([[[0.5, 0.5]]])
    target = torch.tensor([[[0.5 - 2**-20, 0.5 - 2**-20], [1.0, 0.0]]])
    outcome = accept_sampled(
        torch.tensor([[0]]), proposal, target, torch.tensor([[1 - 2**-24]]), torch.tensor([0.75])
    )
    assert outcome.accepted.tolist() == [0]
    assert outcome.bonus.tolist() == [1]


@pytest.mark.parametrize("sampled", [True, False])
def test_a_draft_without_target_mass_is_never_accepted(sampled: bool) -> None:
    """Not even by the least uniform, 0."""
    proposal = torch.tensor([[[0.5, 0.5]]]) if sampled else None
    target = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
    zero = torch.zeros(1, 1)
    outcome = accept_sampled(torch.tensor([[0]]), proposal, target, zero, zero[0])
    assert (outcome.accepted.tolist(), outcome.bonus.tolist()) == ([0], [1])


def test_equal_probabilities_always_accept() -> None:
    """The largest float32 uniform below 1 still accepts when p_t = p_d."""
    probs = torch.tensor([[[0.3, 0.7]]])
    target = torch.cat([probs, probs], dim=1)
    uniform = torch.tensor([[1 - 2**-24]])
    outcome = accept_sampled(torch.tensor([[1]]), probs, target, uniform, torch.tensor([0.0]))
    assert outcome.accepted.tolist() == [1]


@EXAMPLES
@given(
    seed=seeds, uniform=st.floats(0, 1, exclude_max=True), scale=st.sampled_from([1e-30, 1.0, 7.0])
)
def test_inverse_cdf_never_draws_zero_weight(seed: int, uniform: float, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = _probs(generator, 1, 7, sparse=True).double() * scale
    index = int(sample_inverse_cdf(weights, torch.tensor([uniform], dtype=torch.float64)))
    assert weights[0, index] > 0
    below = float(weights[0, :index].sum())
    assert below <= uniform * float(weights.sum()) * (1 + 1e-12)


def test_inverse_cdf_takes_the_first_index_beyond_the_uniform() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 0.0, 1.0, 2.0, 0.0]]).expand(4, -1)
    uniforms = torch.tensor([0.0, 0.25, 0.5, 1 - 2**-24])
    assert sample_inverse_cdf(weights, uniforms).tolist() == [1, 4, 5, 5]


@pytest.mark.parametrize("bad", [0.0, float("nan")])
def test_inverse_cdf_rejects_rows_without_mass(bad: float) -> None:
    with pytest.raises(ValueError, match="no probability mass"):
        sample_inverse_cdf(torch.full((1, 3), bad), torch.tensor([0.5]))


def _reference_distribution(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> Tensor:
    """One row, token by token."""
    probs = torch.softmax(logits / temperature, 0)
    order = sorted(range(len(probs)), key=lambda i: (-float(probs[i]), i))
    kept = torch.zeros_like(probs)
    mass = 0.0
    for rank, token in enumerate(order):
        p = float(probs[token])
        if rank < top_k and mass <= top_p and p >= min_p * float(probs[order[0]]):
            kept[token] = p
        mass += p
    return kept / kept.sum()


@EXAMPLES
@given(
    seed=seeds,
    first_try=st.integers(1, 12),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.sampled_from([1, 2, 5, 1 << 30]),
    top_p=st.sampled_from([0.1, 0.55, 0.93, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.7]),
)
def test_distribution_matches_the_token_by_token_reference(
    seed: int, first_try: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    # Coarse logits make ties likely.
    logits = torch.randint(0, 6, (2, 2, 12), generator=generator).float() * 0.7
    settings_ = BatchSampling.uniform(2, temperature, top_k, top_p, min_p)
    original = sampling_module._FIRST_TRY
    sampling_module._FIRST_TRY = first_try
    try:
        probs = target_distribution(logits, settings_)
    finally:
        sampling_module._FIRST_TRY = original
    for r in range(2):
        for k in range(2):
            expected = _reference_distribution(logits[r, k], temperature, top_k, top_p, min_p)
            assert torch.allclose(probs[r, k], expected, atol=1e-6)


def test_rows_keep_their_own_settings() -> None:
    logits = torch.randn(3, 2, 20, generator=torch.Generator().manual_seed(0))
    mixed = BatchSampling(
        temperature=torch.tensor([0.0, 0.7, 1.0]),
        top_k=torch.tensor([1 << 30, 4, 1 << 30]),
        top_p=torch.tensor([1.0, 0.9, 0.5]),
        min_p=torch.tensor([0.0, 0.0, 0.1]),
    )
    probs = target_distribution(logits, mixed)
    assert torch.equal(probs[0].argmax(-1), logits[0].argmax(-1))
    assert probs[0].max(-1).values.tolist() == [1.0, 1.0]
    for r, args in enumerate([None, (0.7, 4, 0.9, 0.0), (1.0, 1 << 30, 0.5, 0.1)]):
        if args is not None:
            alone = target_distribution(logits[r : r + 1], BatchSampling.uniform(1, *args))
            assert torch.allclose(probs[r], alone[0])


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1.0), ("top_k", 0), ("top_p", 0.0), ("top_p", 1.5), ("min_p", -0.1)],
)
def test_bad_settings_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        BatchSampling.uniform(2, **{name: value})  # type: ignore[arg-type]


def test_shape_mistakes_are_named() -> None:
    draft = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="target_argmax"):
        accept_greedy(draft, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match="verify lengths"):
        accept_greedy(draft, torch.zeros(2, 4, dtype=torch.int64), torch.tensor([0, 4]))
    with pytest.raises(ValueError, match="bonus_uniforms"):
        accept_sampled(draft, None, torch.ones(2, 4, 5), torch.zeros(2, 3), torch.zeros(3))
    with pytest.raises(ValueError, match=r"\[R\]"):
        Acceptance(torch.zeros(2, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))


def test_nan_rows_give_some_token_where_nothing_is_checked() -> None:
    """On an accelerator a bad index ends the process, and the check would be waited for."""
    rows = torch.tensor([[0.0, 0.0, 0.0], [torch.nan] * 3, [0.0, 1.0, 0.0]])
    drawn = sample_inverse_cdf(rows, torch.full((3,), 0.5), checked=False)
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) <= 2
    assert int(drawn[2]) == 1
    cut = sampling_module.truncate_all(rows, torch.full((3,), 2), torch.ones(3), torch.zeros(3))
    assert cut[2].tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize("argmax_drafts", [False, True])
def test_a_draft_that_the_target_excludes_is_rejected_by_a_uniform_of_0(
    argmax_drafts: bool,
) -> None:
    target = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]])
    proposal = None if argmax_drafts else torch.tensor([[[0.5, 0.5, 0.0]]])
    none = torch.zeros(1, 1), torch.zeros(1)
    found = accept_sampled(torch.tensor([[0]]), proposal, target, *none)
    assert (found.accepted.tolist(), found.bonus.tolist()) == ([0], [1])


def test_settings_and_logits_are_of_the_same_requests() -> None:
    for requests in (1, 3):
        with pytest.raises(ValueError, match=f"2 rows of logits, {requests} of settings"):
            target_distribution(torch.zeros(2, 1, 4), BatchSampling.uniform(requests, 1.0))


@pytest.fixture
def double_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("double_by_default")
def test_settings_are_as_wide_as_upstreams() -> None:
    """SGLang changes torch's default while it loads a model."""
    found = BatchSampling.uniform(2, 0.7, top_p=0.9, min_p=0.1)
    assert {found.temperature.dtype, found.top_p.dtype, found.min_p.dtype} == {torch.float32}
    assert found.top_k.dtype == torch.int64
