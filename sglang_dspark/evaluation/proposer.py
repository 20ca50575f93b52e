"""What the reference engine asks of a drafter, whatever its kind, and how a drafter is opened.

A proposer starts a state for the slots of a run. The engine feeds the state with what the target
has seen (`prefill`, `commit`) and asks it for drafts (`propose`); the state alone knows what it
keeps of a sequence. Accepting is the engine's business.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from sglang_dspark.baselines import ChainDrafter, ChainProposer, DFlashDrafter, DFlashProposer
from sglang_dspark.baselines import dflash as dflash_format
from sglang_dspark.baselines import eagle3 as eagle3_format
from sglang_dspark.baselines import mtp as mtp_format
from sglang_dspark.common.files import brief
from sglang_dspark.drafter import DraftBlock, DrafterConfig, DSparkDrafter, load_drafter
from sglang_dspark.drafter.config import (
    DENSE_ARCHITECTURES,
    read_config,
    require_computed,
)
from sglang_dspark.drafter.context import FeatureState, shorter_block
from sglang_dspark.drafter.fields import reading_config
from sglang_dspark.errors import DSparkError
from sglang_dspark.evaluation.target import TargetModel

Drafter = DSparkDrafter | DFlashDrafter | ChainDrafter
KINDS = ("dspark", "dflash", "eagle3", "mtp")


class DraftState(Protocol):
    """A drafter's memory of the requests in flight, one slot each.

    features [R, q, m*d] and hidden [R, q, d] are the target's, of the tokens [R, q] it has read.
    """

    def prefill(self, rows: Tensor, tokens: Tensor, features: Tensor, hidden: Tensor) -> None:
        """A new prompt, tokens [R, P] at positions 0.., in slots `rows` [R]."""

    def propose(
        self,
        rows: Tensor | None,
        anchor: Tensor,
        lens: Tensor,
        temperature: Tensor | None,
        generator: torch.Generator,
    ) -> DraftBlock:
        """gamma drafts after anchor [R], which stands at position lens [R]; None: all slots.

        temperature [R], None: all greedy. `DraftBlock.probs` must be the exact laws drawn from.
        """

    def commit(
        self,
        rows: Tensor,
        lens: Tensor,
        tokens: Tensor,
        features: Tensor,
        hidden: Tensor,
        accepted: Tensor,
    ) -> None:
        """The verify window, tokens [R, 1 + gamma] at positions lens.., of whose drafts the first
        accepted [R] stay."""


class Proposer(Protocol):
    """A drafter made ready for a block size.

    gamma: drafts a step. target_layer_ids: layers whose features it reads; empty: none.
    """

    gamma: int
    target_layer_ids: tuple[int, ...]

    def start(self, slots: int, max_len: int) -> DraftState:
        """Empty state for requests of at most `max_len` tokens."""


class DSparkState(FeatureState):
    """Context of the requests in flight of a DSpark drafter."""

    def __init__(self, drafter: DSparkDrafter, slots: int, max_len: int):
        self.drafter = drafter
        super().__init__(drafter.backbone, drafter.config, slots, max_len)

    def propose(
        self,
        rows: Tensor | None,
        anchor: Tensor,
        lens: Tensor,
        temperature: Tensor | None,
        generator: torch.Generator,
    ) -> DraftBlock:
        """See `DraftState`."""
        context = self.context.read(rows, int(lens.max()))
        h = self.drafter.forward_block(anchor, lens, context, lens)  # [R, gamma, d]
        return self.drafter.draft(anchor, h, temperature, generator)


class DSparkProposer:
    """A DSpark drafter with at most its trained block size."""

    def __init__(self, drafter: DSparkDrafter, gamma: int | None = None):
        self.drafter = drafter
        if gamma is not None:
            self.drafter = copy.copy(drafter)  # with a smaller block, sharing its weights
            self.drafter.config = shorter_block(drafter.config, gamma)
        self.gamma = self.drafter.config.gamma
        self.target_layer_ids = drafter.config.target_layer_ids

    def start(self, slots: int, max_len: int) -> DSparkState:
        """See `Proposer`."""
        return DSparkState(self.drafter, slots, max_len)


def proposer_of(drafter: Drafter, gamma: int | None = None) -> Proposer:
    """A drafter of any kind for blocks of gamma drafts; None: what it was trained for.

    Raises DSparkError when a parallel drafter's block is smaller than gamma.
    """
    if isinstance(drafter, DSparkDrafter):
        return DSparkProposer(drafter, gamma)
    if isinstance(drafter, DFlashDrafter):
        return DFlashProposer(drafter, gamma)
    return ChainProposer(drafter, gamma)


def drafter_kind(path: Path | str) -> str:
    """Which of KINDS a checkpoint directory holds, by its config.json.

    Raises DSparkError when there is none, it is no drafter that we know, or one that only SGLang
    computes.
    """
    raw = read_config(Path(path))
    architectures = raw.get("architectures") or []
    known = {
        dflash_format.ARCHITECTURE: "dflash",
        eagle3_format.ARCHITECTURE: "eagle3",
        mtp_format.ARCHITECTURE: "mtp",
    }
    with reading_config(path):
        kinds = [known[str(name)] for name in architectures if str(name) in known]
        dspark = any("DSpark" in str(name) for name in architectures)
    if kinds:
        return kinds[0]
    if dspark:
        require_computed(raw, Path(path))
        return "dspark"
    raise DSparkError(
        f"drafter {path}: architectures {brief(architectures, 60)} in config.json is no drafter "
        f"(known: {', '.join((*DENSE_ARCHITECTURES, *known))}); name another drafter"
    )


def drafter_layers(path: Path | str) -> tuple[int, ...]:
    """Target layers that the target must be loaded with for this drafter; empty: none."""
    kind = drafter_kind(path)
    if kind == "dspark":
        return DrafterConfig.from_dir(Path(path)).target_layer_ids
    if kind == "dflash":
        return dflash_format.DFlashConfig.from_dir(Path(path)).target_layer_ids
    if kind == "eagle3":
        return eagle3_format.Eagle3Config.from_dir(Path(path)).target_layer_ids
    return ()


def open_drafter(path: Path | str, target: TargetModel) -> Drafter:
    """Load a drafter of any kind and attach it to the target.

    Raises DSparkError for a missing, damaged or foreign checkpoint and for another target.
    """
    folder, embed, head = Path(path), target.embed_weight, target.head_weight
    kind = drafter_kind(folder)
    if kind == "dspark":
        return load_drafter(folder, embed, head, target.num_layers)
    if kind == "dflash":
        return dflash_format.load_dflash(folder, embed, head)
    if kind == "eagle3":
        return eagle3_format.load_eagle3(folder, embed, head)
    return mtp_format.load_mtp(folder, embed, head)
