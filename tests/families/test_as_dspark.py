"""A DFlash drafter as one of DSpark's: the same drafts, in a format that a DSPARK server reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dspark.drafter.checkpoint import load_drafter
from sglang_dspark.drafter.draft_confidence import draft_confidence
from sglang_dspark.drafter.target_fit import Target
from sglang_dspark.errors import DSparkError
from sglang_dspark.families.dflash.as_dspark import as_dspark
from sglang_dspark.families.dflash.checkpoint import save_dflash
from sglang_dspark.serving.checkpoint import convert_drafter, validate_drafter
from tests.families.helpers import GAMMA, LAYERS, WIDTH, random_drafter

VOCAB, ROWS, CONTEXT = 41, 4, 6
TARGET = Target("TARGET", WIDTH, VOCAB, 3, "LlamaForCausalLM")
TEMPERATURE = torch.tensor([1.0, 0.5, 2.0, 0.0])


def shared() -> tuple[Tensor, Tensor]:
    """Embedding and LM head of a target."""
    generator = torch.Generator().manual_seed(1)
    embed, head = torch.randn(2, VOCAB, WIDTH, generator=generator).unbind()
    return embed, head


def drafted(drafter: Any, *, sequential: bool) -> Any:
    """The drafter's `DraftBlock` of ROWS requests, at TEMPERATURE."""
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(ROWS, CONTEXT, len(LAYERS) * WIDTH, generator=generator)
    positions = torch.arange(CONTEXT).expand(ROWS, -1)
    context = drafter.context_kv(features, positions)
    anchor = torch.arange(ROWS) + 5
    at = torch.full((ROWS, 1), CONTEXT)
    h = drafter.forward_blocks(anchor[:, None], at, context, at)[:, 0]
    assert h.shape == (ROWS, GAMMA, WIDTH)
    if sequential:
        return drafter.draft(anchor, h, TEMPERATURE, generator)
    return drafter.draft(h, TEMPERATURE, generator)


@torch.no_grad()
@pytest.mark.parametrize(
    "ids", [None, torch.tensor([2, 3, 7, 11, 30, 40])], ids=["whole", "reduced"]
)
def test_drafts_and_their_distributions_are_the_same(ids: Tensor | None, tmp_path: Path) -> None:
    dflash: Any = random_drafter("dflash", VOCAB, ids)
    dflash.attach(*shared())
    save_dflash(dflash, tmp_path / "dflash")
    convert_drafter(tmp_path / "dflash", tmp_path / "dspark", TARGET)
    with pytest.raises(DSparkError, match=r"dspark models convert .* --out FOLDER"):
        validate_drafter(tmp_path / "dflash", TARGET)
    validate_drafter(tmp_path / "dspark", TARGET)
    converted = load_drafter(tmp_path / "dspark", *shared())
    used = converted.markov_head.markov_w2.weight.count_nonzero()
    assert used == (0 if ids is None else VOCAB - len(ids)), "the head only restricts"
    theirs, ours = drafted(dflash, sequential=False), drafted(converted, sequential=True)
    assert theirs.probs is not None
    torch.testing.assert_close(ours.probs, theirs.probs, atol=1e-6, rtol=1e-5)
    assert torch.equal(ours.tokens[3], theirs.tokens[3]), "the greedy request's"
    columns = ours.probs[:3] if ids is None else ours.probs[:3][..., ids]
    expected = draft_confidence(columns.log())  # at the requests' temperatures already
    torch.testing.assert_close(ours.confidence_logits[:3], expected, atol=1e-3, rtol=1e-3)


def test_a_dtype_is_kept_and_the_heads_are_gone(tmp_path: Path) -> None:
    dflash: Any = random_drafter("dflash", VOCAB, torch.tensor([2, 3, 7]))
    save_dflash(dflash, tmp_path / "dflash", torch.bfloat16)
    convert_drafter(tmp_path / "dflash", tmp_path / "dspark", TARGET)
    converted = load_drafter(tmp_path / "dspark", *shared())
    assert converted.confidence_head is None
    assert not converted.config.sample_from_anchor
    assert converted.config.gamma == GAMMA
    size = (tmp_path / "dspark" / "model.safetensors").stat().st_size
    weights = sum(parameter.numel() for parameter in converted.parameters())
    assert size < 2 * weights + 20_000
    assert torch.equal(as_dspark(dflash).backbone.norm.weight, dflash.backbone.norm.weight)


def test_another_targets_drafter_is_refused(tmp_path: Path) -> None:
    dflash: Any = random_drafter("dflash", VOCAB)
    save_dflash(dflash, tmp_path / "dflash")
    other = Target("TARGET", WIDTH, VOCAB + 1, 3, "LlamaForCausalLM")
    with pytest.raises(DSparkError, match="vocab"):
        convert_drafter(tmp_path / "dflash", tmp_path / "dspark", other)
    shallow = Target("TARGET", WIDTH, VOCAB, 2, "LlamaForCausalLM")
    with pytest.raises(DSparkError, match="last layer"):
        convert_drafter(tmp_path / "dflash", tmp_path / "dspark", shallow)
    assert not (tmp_path / "dspark").exists()
