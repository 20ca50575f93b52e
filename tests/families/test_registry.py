"""The registry of drafter families: complete entries, and one line for an unknown one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from torch import nn

from sglang_dspark.errors import DSparkError
from sglang_dspark.families import registry
from sglang_dspark.families.family import Family

FOLDER = Path(registry.__file__).parent
SHARED = {"chain", "learning", "__pycache__"}


def test_each_folder_is_a_registered_family() -> None:
    folders = {each.name for each in FOLDER.iterdir() if each.is_dir()} - SHARED
    assert folders == set(registry.NAMES)


@pytest.mark.parametrize("family", registry.FAMILIES, ids=registry.NAMES)
def test_an_entry_is_whole(family: Family) -> None:
    """Its name is its folder's; a training config selects it; nothing of it is another's."""
    assert registry.NAMES[registry.FAMILIES.index(family)] == family.name
    assert family.architectures
    assert family.recipes
    assert issubclass(family.model, nn.Module)
    assert callable(family.config.from_dir)
    for each in family.recipes:
        assert registry.recipe(each.kind) is each
        assert each.shape.model_fields["kind"].annotation is not None
    names = [name for each in registry.FAMILIES for name in each.architectures]
    assert len(set(names)) == len(names)
    kinds = [each.kind for one in registry.FAMILIES for each in one.recipes]
    assert sorted(kinds) == sorted(registry.RECIPES)


def test_an_unknown_family_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MedusaModel"]}))
    with pytest.raises(DSparkError, match=r"MedusaModel.*DFlashDraftModel.*LlamaForCausalLMEagle"):
        registry.family_of(tmp_path)
    with pytest.raises(DSparkError, match=f"'medusa' is none of {', '.join(registry.RECIPES)}"):
        registry.recipe("medusa")
    with pytest.raises(DSparkError, match=f"Linear is no drafter of {', '.join(registry.NAMES)}"):
        registry.proposer_of(nn.Linear(1, 1))


def test_a_whole_name_goes_before_a_mark(tmp_path: Path) -> None:
    """DSpark claims every name that contains its mark, but not a folder that names another."""
    names = ["Qwen3DSparkModel", "DFlashDraftModel"]
    (tmp_path / "config.json").write_text(json.dumps({"architectures": names}))
    assert registry.drafter_kind(tmp_path) == "dflash"
