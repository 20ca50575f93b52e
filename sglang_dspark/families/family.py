"""Define `Family` and `Recipe`, the interface of a drafter family to the rest of the package."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sglang_dspark.families.learning.learner import Ingredients, Learner
from sglang_dspark.families.proposer import Proposer
from sglang_dspark.families.shape import BaseShape


def accept_any(_: Any, __: Any) -> None:
    """Accept every input; the default of the checks below."""


@dataclass(frozen=True)
class Recipe:
    """One way to train a family: a value of `drafter.kind` in a training config.

    shape: the options of `drafter`. build: makes the learner. check(shape, target): raises
    DSparkError if no such drafter can be made for the target (its Transformers config).
    """

    kind: str
    shape: type[BaseShape]
    build: Callable[[Ingredients], Learner]
    check: Callable[[Any, Any], object] = accept_any


@dataclass(frozen=True)
class Family:
    """A drafter family, exported as `FAMILY` by its folder and listed in `registry`.

    name: of the folder, and the kind in traces and tables.
    architectures: its names in config.json that SGLang recognises.
    mark: a part of an architecture's name that is enough to recognise it; empty: the whole name.
    config: class with `from_dir(path)`; `target_layer_ids` are the layers that it reads.
    reads_features: whether it reads features of target layers; if not, it needs none captured.
    model: module class; the trained drafter.
    load(path, embed_tokens, lm_head, num_layers): reads a checkpoint and attaches it.
    save(drafter, path, dtype): writes a checkpoint that SGLang serves.
    proposer(drafter, gamma): makes it ready for the reference engine; None: the trained gamma.
    recipes: how it is trained.
    check(raw, path): raises DSparkError for a config.json that only SGLang computes.
    """

    name: str
    architectures: tuple[str, ...]
    config: Any
    model: type[nn.Module]
    load: Callable[[Path, Tensor, Tensor, int | None], nn.Module]
    save: Callable[[Any, Path, torch.dtype], None]
    proposer: Callable[[Any, int | None], Proposer]
    recipes: tuple[Recipe, ...]
    mark: str = ""
    reads_features: bool = True
    check: Callable[[Mapping[str, Any], Path], None] = accept_any
