"""The compiled confidence head against upstream's own, and when upstream's is left to run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dspark.backends.cpu import csrc, draft
from sglang_dspark.backends.cpu.draft import confidence_of
from tests.backends.cpu.operator_levels import LEVELS, force_level

V, D, RANK, GAMMA = 60, 40, 16, 5


def model(with_markov: bool = True, bias: bool = True) -> Any:
    from sglang.srt.models import dspark

    torch.manual_seed(5)
    head = dspark.DSparkConfidenceHead(
        hidden_size=D, markov_rank=RANK, with_markov=with_markov, bias=bias
    )
    head.proj.weight.data.normal_(0, 0.3)
    head.sts_temperatures = torch.rand(GAMMA) + 0.5
    markov = dspark.VanillaMarkov(vocab_size=V, markov_rank=RANK)
    markov.markov_w1.weight.data.normal_()
    return SimpleNamespace(confidence_head=head, markov_head=markov)


def block(rows: int) -> dict[str, Tensor]:
    ids = torch.randint(V, (rows, GAMMA))
    return {
        "anchor_tokens": ids[:, 0],
        "draft_tokens": torch.randint(V, (rows, GAMMA)),
        "confidence_features": torch.randn(rows * GAMMA, D),
    }


def upstreams(draft_model: Any, **given: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        found: tuple[Tensor, Tensor] = draft_model.confidence_head.predict(
            given["confidence_features"],
            anchor_tokens=given["anchor_tokens"],
            draft_tokens=given["draft_tokens"],
            markov_head=draft_model.markov_head,
        )
    return found


def ours_of(draft_model: Any, given: dict[str, Tensor]) -> Tensor:
    names = ("anchor_tokens", "draft_tokens", "confidence_features")
    logits = confidence_of(draft_model, *(given[name] for name in names))
    assert logits is not None
    return logits


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("with_markov", "bias"), [(True, True), (False, True), (True, False)])
def test_logits_are_upstreams(rows: int, with_markov: bool, bias: bool) -> None:
    drafter, given = model(with_markov, bias), block(rows)
    mine, other = ours_of(drafter, given), upstreams(drafter, **given)[1]
    assert mine.shape == other.shape == (rows, GAMMA)
    assert (mine - other).abs().max() < 1e-5


def test_every_instruction_set_computes_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, given = model(), block(3)
    found = []
    for level in LEVELS:
        force_level(monkeypatch, draft, level)
        found.append(ours_of(drafter, given))
    assert all(torch.equal(each, found[0]) for each in found)


def test_without_the_library_upstreams_path_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csrc, "why_not", lambda: "it is missing")
    drafter, given = model(), block(2)
    drafter.compute_confidence = lambda **block: upstreams(drafter, **block)
    assert torch.equal(ours_of(drafter, given), upstreams(drafter, **given)[1])


def test_weights_written_in_place_are_seen() -> None:
    drafter, given = model(), block(2)
    before = ours_of(drafter, given)
    drafter.confidence_head.proj.weight.data.mul_(2)
    after = ours_of(drafter, given)
    assert (after - upstreams(drafter, **given)[1]).abs().max() < 1e-5
    assert (after - before).abs().max() > 0.1


def test_other_types_keep_upstreams_path() -> None:
    drafter, given = model(), block(2)
    drafter.confidence_head.proj.bfloat16()
    drafter.compute_confidence = lambda **block: upstreams(drafter, **block)
    mine = ours_of(drafter, given)
    assert torch.equal(mine, upstreams(drafter, **given)[1])


def test_a_drafter_without_the_head_has_none() -> None:
    given = block(2)
    drafter = SimpleNamespace(confidence_head=None)
    found = confidence_of(drafter, given["anchor_tokens"], given["draft_tokens"], torch.empty(0))
    assert found is None
