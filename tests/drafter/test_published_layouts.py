"""Drafters in the layouts that trainers write draft as an independent reference, converted too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_dspark.drafter.target_fit import Target
from sglang_dspark.serving.checkpoint import convert_drafter, validate_drafter
from tests.drafter.published import drafts
from tests.drafter.published_layouts import Layout, layouts
from tests.drafter.test_published import drafted, opened, target_of

LAYOUTS = tuple(layouts())


def test_there_are_enough_of_them() -> None:
    assert len({layout.name for layout in LAYOUTS}) == len(LAYOUTS) >= 80


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_it_drafts_as_it_was_trained(layout: Layout, tmp_path: Path) -> None:
    """As published, where our engine reads it, and after conversion, which a server reads."""
    p = layout.published()
    path, out = layout.write(p, tmp_path / "published"), tmp_path / "converted"
    target: Target = target_of(p, tmp_path / "target")
    convert_drafter(path, out, target)
    validate_drafter(out, target)
    features = torch.randn(11, 2 * p.hidden, generator=torch.Generator().manual_seed(9))
    expected = drafts(p, features, 7)
    for folder in (path, out) if layout.has_heads else (out,):
        tokens, _, confidence = drafted(opened(p, folder), features, 7, 0.0)
        assert tokens == expected.tokens
        if layout.has_heads:
            torch.testing.assert_close(confidence, expected.confidence, atol=1e-4, rtol=1e-4)
