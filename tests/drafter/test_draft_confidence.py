"""Confidence logits from a draft's distribution."""

from __future__ import annotations

import pytest
import torch

from sglang_dspark.drafter import draft_confidence as module
from sglang_dspark.drafter.draft_confidence import draft_confidence


@pytest.mark.parametrize("largest", [0.3, 0.5, 0.9, 1 - 1e-5])
def test_it_is_the_logit_of_the_largest_probability(largest: float) -> None:
    rest = (1 - largest) / 4
    logits = torch.tensor([[[rest, rest, largest, rest, rest]]]).log() + 7.0
    found = draft_confidence(logits)
    assert found.shape == (1, 1)
    assert float(found.sigmoid()) == pytest.approx(largest, abs=1e-6)


def test_each_request_has_its_own_temperature() -> None:
    logits = torch.randn(3, 3, 11, generator=torch.Generator().manual_seed(0)) * 2
    found = draft_confidence(logits, torch.tensor([1.0, 0.25, 0.0]))
    scaled = logits / torch.tensor([1.0, 0.25, 1.0])[:, None, None]
    expected = torch.softmax(scaled, -1).amax(-1)
    torch.testing.assert_close(found.sigmoid(), expected)
    assert (found[1] > draft_confidence(logits)[1]).all(), "a colder draft is surer"
    torch.testing.assert_close(found[::2], draft_confidence(logits)[::2])


def test_certainty_is_finite_and_no_distribution_is_nan() -> None:
    logits = torch.tensor(
        [[[90.0, 0.0], [3.0, -torch.inf], [0.0, torch.nan], [-torch.inf, -torch.inf]]]
    )
    found = draft_confidence(logits)[0]
    assert found[:2].tolist() == pytest.approx([16.6, 16.6], abs=0.1)
    assert found[2:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_it_is_float32_of_any_logits(dtype: torch.dtype) -> None:
    logits = torch.tensor([[[2.0, 0.0, 0.0]]], dtype=dtype)
    found = draft_confidence(logits)
    assert found.dtype is torch.float32
    assert float(found) == pytest.approx(2.0 - torch.tensor(2.0).log().item(), abs=1e-5)


def test_many_requests_are_estimated_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, 2, 9, generator=generator)
    temperature = torch.rand(7, generator=generator) + 0.3
    whole = draft_confidence(logits, temperature)
    monkeypatch.setattr(module, "_AT_ONCE", 3 * 2 * 9)
    assert torch.equal(draft_confidence(logits, temperature), whole)
