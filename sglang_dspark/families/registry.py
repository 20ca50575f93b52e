"""Register the drafter families, and find them by name, path or module.

To add a family, add the name of its folder to `NAMES`.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from sglang_dspark.common.files import brief
from sglang_dspark.drafter.config import read_config
from sglang_dspark.drafter.fields import reading_config
from sglang_dspark.errors import DSparkError
from sglang_dspark.families.family import Family, Recipe
from sglang_dspark.families.learning.learner import Ingredients, Learner
from sglang_dspark.families.proposer import Proposer

NAMES = ("dspark", "dflash", "eagle3", "mtp")  # one folder each
FAMILIES: tuple[Family, ...] = tuple(
    import_module(f"sglang_dspark.families.{name}").FAMILY for name in NAMES
)
RECIPES: dict[str, Recipe] = {r.kind: r for family in FAMILIES for r in family.recipes}


class Target(Protocol):
    """The parts of a loaded target that drafters share: its embedding and LM head, both [V, d]."""

    @property
    def embed_weight(self) -> Tensor: ...
    @property
    def head_weight(self) -> Tensor: ...
    @property
    def num_layers(self) -> int: ...


def family_of(path: Path | str) -> Family:
    """Return the family of a checkpoint directory, by its config.json.

    Raises DSparkError if there is no config.json, the drafter is unknown, or only SGLang computes
    it.
    """
    raw = read_config(Path(path))
    architectures = raw.get("architectures") or []
    with reading_config(path):
        names = [str(name) for name in architectures]
        family = _recognise(names)
    if family is None:
        known = ", ".join(name for each in FAMILIES for name in each.architectures)
        raise DSparkError(
            f"drafter {path}: architectures {brief(architectures, 60)} in config.json is no "
            f"drafter (known: {known}); name another drafter"
        )
    family.check(raw, Path(path))
    return family


def _recognise(architectures: list[str]) -> Family | None:
    """Match whole names before marks: a mark matches every name that contains it."""
    whole = {name: each for each in FAMILIES if not each.mark for name in each.architectures}
    for name in architectures:
        if name in whole:
            return whole[name]
    marked = (each for each in FAMILIES if each.mark)
    return next((f for f in marked if any(f.mark in name for name in architectures)), None)


def drafter_kind(path: Path | str) -> str:
    """Return the name of a checkpoint's family. Raises DSparkError as `family_of`."""
    return family_of(path).name


def drafter_layers(path: Path | str) -> tuple[int, ...]:
    """Return the target layers whose features a drafter reads; empty: none."""
    family = family_of(path)
    layers: tuple[int, ...] = ()
    if family.reads_features:
        layers = family.config.from_dir(Path(path)).target_layer_ids
    return layers


def open_drafter(path: Path | str, target: Target) -> nn.Module:
    """Load a drafter of any family and attach it to the target.

    Raises DSparkError for a missing, damaged or foreign checkpoint and for another target.
    """
    family = family_of(path)
    return family.load(Path(path), target.embed_weight, target.head_weight, target.num_layers)


def proposer_of(drafter: nn.Module, gamma: int | None = None) -> Proposer:
    """Make a drafter ready to propose gamma drafts per step; None: the gamma it was trained for.

    Raises DSparkError if a parallel drafter's block is smaller than gamma.
    """
    family = next((each for each in FAMILIES if isinstance(drafter, each.model)), None)
    if family is None:
        raise DSparkError(f"{type(drafter).__name__} is no drafter of {', '.join(NAMES)}")
    return family.proposer(drafter, gamma)


def recipe(kind: str) -> Recipe:
    """Return the recipe of a config's kind. Raises DSparkError that lists the known kinds."""
    if kind not in RECIPES:
        raise DSparkError(f"drafter.kind {kind!r} is none of {', '.join(RECIPES)}")
    return RECIPES[kind]


def build_learner(ingredients: Ingredients) -> Learner:
    """Build the learner of the config's kind. Raises DSparkError for an unknown kind."""
    return recipe(ingredients.shape.kind).build(ingredients)


def check_shape(shape: Any, target: Any) -> None:
    """Raise DSparkError if no drafter of this shape can be made for the target (its config)."""
    recipe(shape.kind).check(shape, target)
