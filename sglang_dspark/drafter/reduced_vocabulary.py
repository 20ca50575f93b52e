"""Convert the tensors of a Speculators drafter over a reduced vocabulary to our weights.

Stored: W1 [V, r], indexed by the target's token ids; W2 [V', r] and `lm_head` [V', d], one row for
each draft column; `d2t` [V'], token id minus column, or the token id itself if only that names
tokens; `t2d` [V], True for a token with a column. Other trainers write the same tensors. The
library freezes `lm_head` at the target's rows, so it is compared with them and then dropped.

Loaded: the restriction of drafter/heads.py, a last rank that is -30 for tokens without a column.
Ranks before it are padded with zeros (drafter/speculators.py, `Reduction`).
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from sglang_dspark.drafter.heads import OUTSIDE_VOCABULARY_BIAS, SATURATED
from sglang_dspark.drafter.speculators import Reduction
from sglang_dspark.drafter.weight_files import Shape, Shapes, Stored, load_tensors
from sglang_dspark.errors import DSparkError

D2T, T2D, HEAD = "d2t", "t2d", "lm_head.weight"
MOST_HEAD_ERROR = 0.01  # relative; rounding to bfloat16 costs 0.002, a trained head far more
_W1, _W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_GATE, _JOINT = "markov_head.gate_proj", "markov_head.joint_proj"
_CONFIDENCE = "confidence_head.proj.weight"
_AGAIN = "fetch or export the drafter again"


def stored_shapes(
    reduction: Reduction, own: Shapes, hidden_size: int, stored: Stored
) -> dict[str, Shape]:
    """Return the shapes that the files must have.

    own: of the same drafter over the whole vocabulary, with the stored rank. `lm_head` and `t2d`
    may be absent.
    """
    columns, vocab_size = reduction.columns, own[_W1][0]
    optional = {HEAD: (columns, hidden_size), T2D: (vocab_size,)}
    present = {name: shape for name, shape in optional.items() if name in stored}
    return {**own, _W2: (columns, reduction.rank), D2T: (columns,), **present}


def read_draft_ids(path: Path, stored: Stored, vocab_size: int) -> Tensor:
    """Read the token id [V'] of each draft column; shapes are checked already.

    Raises DSparkError that names `d2t` or `t2d` if they are unset or disagree.
    """
    names = [name for name in (D2T, T2D) if name in stored]
    for name, kinds in ((D2T, ("I64", "I32")), (T2D, ("BOOL", "U8", "I64"))):
        if name in stored and stored[name].dtype not in kinds:
            raise _damaged(path, f"{name} is stored as {stored[name].dtype}, not {kinds[0]}")
    maps = load_tensors({name: stored[name] for name in names})
    d2t = maps[D2T].long()
    if T2D not in maps and not bool(d2t.any()):
        raise _damaged(path, "d2t is 0 throughout and there is no t2d: they were never set")
    marked = maps[T2D].bool().nonzero()[:, 0] if T2D in maps else None
    try:
        return token_ids(d2t, vocab_size, marked)
    except ValueError as error:
        raise _damaged(path, str(error)) from None


def token_ids(d2t: Tensor, vocab_size: int, marked: Tensor | None = None) -> Tensor:
    """Return the token ids [V'] of the draft columns: `d2t` [V'] holds offsets, or else the ids.

    marked: ascending token ids of t2d, if stored. Raises ValueError if neither reading names
    distinct tokens of the vocabulary.
    """
    ids = d2t + torch.arange(len(d2t))
    fault = _fault(ids, marked, vocab_size)
    if fault is None:
        return ids
    if _fault(d2t, marked, vocab_size) is None:
        return d2t
    raise ValueError(fault)


def _fault(ids: Tensor, marked: Tensor | None, vocab_size: int) -> str | None:
    """Return the reason why `ids` [V'] cannot be the draft columns' tokens, or None.

    marked: ascending token ids of t2d, if stored.
    """
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        return f"d2t names tokens outside the vocabulary of {vocab_size}"
    if len(ids.unique()) != len(ids):
        return "d2t names a token twice"
    if marked is not None and not torch.equal(marked, ids.sort().values):
        return f"t2d marks {len(marked)} tokens and d2t names {len(ids)} which are not those"
    return None


def _damaged(path: Path, what: str) -> DSparkError:
    return DSparkError(f"drafter {path}: {what}; {_AGAIN}")


def require_target_head(path: Path, stored: Stored, ids: Tensor, lm_head: Tensor) -> None:
    """Raise DSparkError unless the stored `lm_head` [V', d] is rows `ids` of the target's [V, d].

    Drafting multiplies by the target's rows. A drafter without a stored head passes.
    """
    if HEAD not in stored:
        return
    own = load_tensors({HEAD: stored[HEAD]})[HEAD].float()
    rows = lm_head[ids].float()
    if float((own - rows).norm()) > MOST_HEAD_ERROR * float(rows.norm()):
        raise DSparkError(
            f"drafter {path}: {HEAD} differs from the target's rows that d2t names, and a head of "
            "the drafter's own is not computed; name the target that it was trained for, or "
            "another drafter"
        )


def widen(tensors: dict[str, Tensor], ids: Tensor, reduction: Reduction) -> dict[str, Tensor]:
    """Expand stored tensors to a drafter whose weights restrict it to tokens `ids` [V']."""
    more = reduction.widened_rank - reduction.rank
    wide = {name: t for name, t in tensors.items() if name not in (D2T, T2D, HEAD)}
    w1 = pad(tensors[_W1], (0, more))
    w1[:, -1] = 1
    w2 = w1.new_zeros(w1.shape, dtype=tensors[_W2].dtype)
    w2[:, -1] = OUTSIDE_VOCABULARY_BIAS
    w2[ids] = pad(tensors[_W2], (0, more))
    wide |= {_W1: w1, _W2: w2}
    confidence = tensors.get(_CONFIDENCE)  # of [h; W1[x]], or of h alone
    if confidence is not None and confidence.shape[1] > tensors["norm.weight"].shape[0]:
        wide[_CONFIDENCE] = pad(confidence, (0, more))
    if f"{_GATE}.weight" in tensors:  # of [h; W1[x]]
        wide |= _saturated(_GATE, pad(tensors[f"{_GATE}.weight"], (0, more, 0, more)), tensors)
    if f"{_JOINT}.weight" in tensors:  # [gate; candidate; output] of [state; W1[x]; h]
        weight, rank = tensors[f"{_JOINT}.weight"], reduction.rank
        state, embedded, hidden = weight.split([rank, rank, weight.shape[1] - 2 * rank], 1)
        weight = torch.cat([pad(state, (0, more)), pad(embedded, (0, more)), hidden], 1)
        rows = torch.cat([pad(part, (0, 0, 0, more)) for part in weight.chunk(3)])
        wide |= _saturated(_JOINT, rows, tensors)
    return wide


def _saturated(name: str, weight: Tensor, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Pad a projection's bias as its weight is, and saturate the output of the last rank."""
    bias = tensors[f"{name}.bias"]
    parts = 3 if name == _JOINT else 1
    more = (len(weight) - len(bias)) // parts
    bias = torch.cat([pad(part, (0, more)) for part in bias.chunk(parts)])
    bias[-1] = SATURATED
    return {f"{name}.weight": weight, f"{name}.bias": bias}
