"""Uncut steps and steps without drafts, which a scheduled worker leaves to SGLang.

The rejection's torch reference is tested, which SGLang compares with its kernels.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")

from sglang.kernels.ops.speculative.dspark import blockwise_rejection as upstream
from sglang.srt import runtime_context
from sglang.srt.layers.sampler import Sampler
from sglang.srt.speculative.dspark_components import dspark_verify
from sglang.srt.speculative.dspark_components.dspark_draft import DraftBlockResult

from sglang_dspark.backends.cuda.accept_plain import plain_tokens
from sglang_dspark.backends.cuda.attach import use_blockwise_rejection
from sglang_dspark.backends.cuda.device import sampled_alone
from sglang_dspark.step.rules import Cuts, Rules
from sglang_dspark.verify import BatchSampling, target_distribution
from tests.backends.cpu.draft_world import settings
from tests.backends.cpu.test_accept_distribution import ALARM, chi_square

V, GAMMA, TEMPERATURE = 12, 2, 0.8
BATCH, STEPS = 50_000, 150_000
GREEDY = torch.arange(BATCH) % 5 == 0


def table(seed: int) -> Tensor:
    return torch.randn(V, V, generator=torch.Generator().manual_seed(seed)) * 0.8


TARGET, DRAFT = table(1), table(2)  # logits behind each last token


def accepted(
    noise: Any, ids: Tensor, lens: Tensor, temperature: float = TEMPERATURE
) -> tuple[Tensor, Tensor]:
    """Accepted drafts and bonus of uncut requests beside greedy ones, as a step asks SGLang."""
    info = settings(torch.where(GREEDY, 0.0, temperature))
    info.need_top_k_sampling, info.need_top_p_sampling = True, False  # the greedy requests' top-k
    found = dspark_verify.accept_draft_tokens(
        candidates=ids,
        target_logits=TARGET[ids].view(-1, V),
        draft_block=DraftBlockResult(
            draft_tokens=ids[:, 1:],
            corrected_logits=DRAFT[ids[:, :-1]],
            greedy_mask=GREEDY,
            temperatures=torch.full((BATCH,), TEMPERATURE),
            greedy_draft=False,
        ),
        sampling_info=sampled_alone(info, Cuts()),
        draft_input=None,
        gamma=GAMMA,
        verify_num_draft_tokens=GAMMA + 1,
        cutoff_layout=SimpleNamespace(verify_lens=lens.int()),
        rejection_noise=noise,
    )
    return found[0].long(), found[1]


def drafted() -> tuple[Tensor, Tensor]:
    """Windows [BATCH, GAMMA + 1] and rows verified of each."""
    ids = torch.zeros(BATCH, GAMMA + 1, dtype=torch.int64)
    proposals = (DRAFT / TEMPERATURE).softmax(-1)
    for i in range(GAMMA):
        ids[:, i + 1] = proposals[ids[:, i]].multinomial(1)[:, 0]
    return ids, torch.randint(1, GAMMA + 2, (BATCH,))


def p_value(temperature: float = TEMPERATURE) -> float:
    """Chi-square p-value of the first two tokens of sampled requests."""
    torch.manual_seed(0)
    noise = upstream.make_rejection_noise(5, "cpu")
    target = target_distribution(TARGET[None], BatchSampling.uniform(1, TEMPERATURE))[0].double()
    counts = torch.zeros(V * V, dtype=torch.float64)
    for _ in range(-(-STEPS * 5 // (4 * BATCH))):
        ids, lens = drafted()
        kept, bonus = accepted(noise, ids, lens, temperature)
        first = torch.where(kept > 0, ids[:, 1], bonus)
        then = torch.where(kept > 1, ids[:, 2], bonus)
        then = torch.where(kept > 0, then, target[first].multinomial(1)[:, 0])
        counts += torch.bincount((first * V + then)[~GREEDY], minlength=V * V)
    assert int(noise.counter) > 0, "SGLang judged by another rule"
    return chi_square(counts, (target[0][:, None] * target).flatten() * counts.sum())


def test_blockwise_rejection_has_plain_decodings_distribution() -> None:
    """Its windows end where the step's do, and greedy requests are judged beside."""
    assert p_value() > ALARM
    assert p_value(temperature=1.2 * TEMPERATURE) < ALARM, "a wrong temperature must be noticed"


def test_greedy_requests_beside_uncut_ones_are_judged_greedily() -> None:
    ids, lens = drafted()
    kept, bonus = accepted(upstream.make_rejection_noise(5, "cpu"), ids, lens)
    for row in torch.nonzero(GREEDY)[:200, 0].tolist():
        best = TARGET[ids[row]].argmax(-1).tolist()
        window, limit, count = ids[row].tolist(), int(lens[row]) - 1, 0
        while count < GAMMA and window[count + 1] == best[count]:
            count += 1
        # SGLang goes on into the rows behind the window, and then takes the draft for its token.
        assert int(kept[row]) == min(count, limit)
        assert int(bonus[row]) == best[min(count, limit)]


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_uncut_steps_of_a_scheduled_cuda_worker_take_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: Any = object()
    monkeypatch.setattr(upstream, "make_rejection_noise", lambda seed, device: (made, seed, device))
    executor = SimpleNamespace(_rejection_noise=None)
    worker = SimpleNamespace(
        device=kind,
        target_worker=SimpleNamespace(random_seed=7),
        _verify_executor=executor,
        _rejection_noise=None,
    )
    use_blockwise_rejection(worker)
    expected = (made, 7, "cuda") if kind == "cuda" else None
    assert (executor._rejection_noise, worker._rejection_noise) == (expected, expected)
    executor._rejection_noise = made  # the user set SGLang's environment variable
    use_blockwise_rejection(worker)
    assert executor._rejection_noise is made


@pytest.mark.parametrize("cuts", [Cuts(), Cuts(top_p=True)])
def test_plain_decodings_sampler_draws_behind_the_anchor(
    cuts: Cuts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row of each window; the others are NaN, and greedy requests have the argmax."""
    monkeypatch.setattr(
        runtime_context,
        "get_exec",
        lambda: SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch")),
    )
    monkeypatch.setattr(
        "sglang.srt.layers.sampler.get_exec",
        lambda: SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch")),
    )
    top_p = 0.8 if cuts.top_p else 1.0
    info = settings(torch.where(GREEDY, 0.0, TEMPERATURE), top_ps=torch.full((BATCH,), top_p))
    info.sampling_mask_batch_indices = info.max_top_k = None
    info.need_top_p_sampling, info.need_min_p_sampling = cuts.top_p, False
    logits = torch.full((BATCH, GAMMA + 1, V), torch.nan)
    logits[:, 0] = TARGET[3]
    kept = logits.clone()
    batch = SimpleNamespace(sampling_info=info, seq_lens=torch.zeros(BATCH, dtype=torch.int64))
    torch.manual_seed(0)
    sampler = object.__new__(Sampler)
    tokens = plain_tokens(sampler, logits.view(-1, V), GAMMA + 1, batch, Rules(cuts=cuts))
    assert torch.equal(logits.nan_to_num(), kept.nan_to_num())
    assert bool((tokens[GREEDY] == TARGET[3].argmax()).all())
    target = (
        target_distribution(TARGET[None, 3:4], BatchSampling.uniform(1, TEMPERATURE, top_p=top_p))
        .view(-1)
        .double()
    )
    counts = torch.bincount(tokens[~GREEDY], minlength=V).double()
    assert chi_square(counts, target * counts.sum()) > ALARM
