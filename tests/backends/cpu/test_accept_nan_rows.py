"""Rows of logits that are no distribution: token 0, and nothing else changes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_dspark.backends.cpu.accept import replace_nan_rows, sampling_probs
from sglang_dspark.patches.cpu import seeds
from sglang_dspark.verify.rejection import sample_inverse_cdf

INF = float("inf")
LOST = {
    "every token is masked": [-INF, -INF, -INF, -INF],
    "a logit is infinite": [1.0, INF, 0.0, 0.0],
    "a logit is NaN": [1.0, float("nan"), 0.0, 0.0],
}
SETTINGS = {"whole": (4, 1.0, 0.0), "top-k": (2, 1.0, 0.0), "top-p": (4, 0.5, 0.0)}
SETTINGS |= {"min-p": (4, 1.0, 0.2), "all": (2, 0.9, 0.2)}


@pytest.mark.parametrize("cut", SETTINGS)
@pytest.mark.parametrize("lost", LOST)
def test_an_invalid_row_is_token_0_and_its_neighbours_keep_their_distribution(
    lost: str, cut: str
) -> None:
    top_k, top_p, min_p = SETTINGS[cut]
    info = SimpleNamespace(
        temperatures=torch.full((3, 1), 0.7),
        top_ks=torch.full((3,), top_k),
        top_ps=torch.full((3,), top_p),
        min_ps=torch.full((3,), min_p),
    )
    sound = [0.3, 1.0, -2.0, 0.9]
    probs = sampling_probs(torch.tensor([sound, LOST[lost], sound]), info, 1)
    assert probs[1].tolist() == [1.0, 0.0, 0.0, 0.0]
    alone = sampling_probs(torch.tensor([sound, sound, sound]), info, 1)
    assert torch.equal(probs[[0, 2]], alone[[0, 2]])
    assert sample_inverse_cdf(probs, torch.full((3,), 0.99))[1] == 0  # which raised


def test_a_sound_row_is_left_as_it_is() -> None:
    probs = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    assert replace_nan_rows(probs.clone()).tolist() == probs.tolist()


def test_prefill_and_plain_decoding_draw_of_it_too() -> None:
    from sglang.srt.layers.sampler import Sampler

    probs = torch.softmax(torch.tensor([[-INF, -INF, -INF], [0.0, -INF, -INF]]), dim=-1)
    info = SimpleNamespace(sampling_seed=None, sampling_mask_batch_indices=None)
    drawn, _ = seeds.sample(Sampler._sample_from_probs, None, probs, info, torch.zeros(2), True)
    assert drawn.view(-1).tolist() == [0, 0]
