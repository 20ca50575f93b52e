"""Average two drafters of one run's stages.

The mean keeps what a later stage learned, without all that it forgot (Wortsman et al., "Robust
fine-tuning of zero-shot models", 2022).
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

from sglang_dspark.common.files import brief
from sglang_dspark.drafter.checkpoint import write_checkpoint
from sglang_dspark.drafter.config import read_config
from sglang_dspark.drafter.heads import restricted_tokens
from sglang_dspark.drafter.weight_files import read_tensors
from sglang_dspark.errors import DSparkError
from sglang_dspark.families.mtp.checkpoint import TOKEN_MAP
from sglang_dspark.quantisation.checkpoint import CONFIG_KEY

_MARKOV = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")


def average(first: Path, second: Path, share: float, out: Path) -> None:
    """Write the drafter with weights (1 - share) first + share second into `out`.

    Sums are float32, the result has the first one's types. The mean is useful only if one drafter
    was trained on from the other. Raises DSparkError if their shapes or draft tokens differ, for
    quantised ones, and if `out` is one of them.
    """
    if out.resolve() in (first.resolve(), second.resolve()):
        raise DSparkError(f"--out {out} is one of the two drafters; name another directory")
    raw, other = read_config(first), read_config(second)
    if CONFIG_KEY in raw:
        raise DSparkError(f"{first} has quantised experts; average what it was made from")
    unlike = (k for k in raw.keys() | other.keys() if raw.get(k) != other.get(k))
    if keys := sorted(k for k in unlike if k != "dtype"):  # a run's files are float32
        raise DSparkError(
            f"{first} and {second} have another config.json, in {brief(', '.join(keys), 60)}: "
            "average two stages of one drafter"
        )
    ours, theirs = read_tensors(first), read_tensors(second)
    _require_alike(first, second, ours, theirs)
    mixed = {name: _mean(ours[name], theirs[name], share) for name in ours}
    write_checkpoint(out, mixed, raw)
    if (first / TOKEN_MAP).exists():
        shutil.copyfile(first / TOKEN_MAP, out / TOKEN_MAP)  # the same tokens, as SGLang reads them


def _mean(ours: Tensor, theirs: Tensor, share: float) -> Tensor:
    if not ours.is_floating_point():
        return ours  # the same in both
    return ours.float().lerp(theirs.float(), share).to(ours.dtype)


def _require_alike(
    first: Path, second: Path, ours: dict[str, Tensor], theirs: dict[str, Tensor]
) -> None:
    shapes = [{name: tuple(t.shape) for name, t in each.items()} for each in (ours, theirs)]
    if shapes[0] != shapes[1]:
        raise DSparkError(f"{first} and {second} have weights of other names or shapes")
    same = all(
        torch.equal(ours[name], theirs[name]) for name in ours if not ours[name].is_floating_point()
    )
    if all(name in ours for name in _MARKOV):  # they hold a DSpark drafter's vocabulary
        ids = [restricted_tokens(*(each[n].float() for n in _MARKOV)) for each in (ours, theirs)]
        same &= torch.equal(*(torch.empty(0) if each is None else each for each in ids))
    if not same:
        raise DSparkError(f"{first} and {second} draft other tokens; average two stages of one run")
