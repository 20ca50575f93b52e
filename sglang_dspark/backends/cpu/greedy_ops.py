"""Accept greedily over rows of logits: argmax, ragged windows, and drafted chains.

`torch.argmax` reads a row one value at a time; csrc/heads.cpp compares rows as integers in vector
registers. A verify window is read only up to the first row that disagrees with its draft (accept
rule at temperature 0; paper, 2). Ties go to the first entry, as in `torch.argmax`; for a row with
NaN the result is undefined. Without the C++ library torch computes it.

`accept_greedy` and `committed` replace the torch forms in
sglang/kernels/ops/speculative/dspark/dspark_accept.py, which spread the rows over [R, gamma + 1]
windows first: at eight requests that copies 9 MB of logits a step.

`verify_chains` replaces the greedy branch of `eagle_sample` and `verify_tree_greedy`
(sglang/srt/speculative/eagle_utils.py, sglang/kernels/ops/speculative/spec_tree.py) where every
tree is a chain (EAGLE with topk 1, as in MTP-1): an argmax over all logits and about thirty small
torch calls.
"""

from __future__ import annotations

from ctypes import c_int64, c_void_p

import torch
from torch import Tensor

from sglang_dspark.backends.cpu.csrc import operator
from sglang_dspark.verify import greedy

_P, _N = c_void_p, c_int64
_ACCEPT = ("accept_greedy", _P, _N, _N, _P, _P, _P, _N, _P, _P)


def row_argmax(values: Tensor) -> Tensor:
    """Return the index of each row's largest entry: [n, V] float32, contiguous -> [n] int64."""
    windows = torch.ones(len(values), 1, dtype=torch.int64)  # without drafts
    return accept_greedy(windows, windows[:, 0], torch.arange(len(values)), values)[1]


def accept_greedy(
    window: Tensor, lens: Tensor, starts: Tensor, logits: Tensor
) -> tuple[Tensor, Tensor]:
    """Accept the longest agreeing prefix of each request's drafts; add the target's next token.

    window: [R, n] int64, anchor and drafts; lens: [R] int64 in 1..n, tokens verified; starts: [R]
    int64, each request's first row of logits [N, V] float32, contiguous; a row for each token.
    Returns accepted drafts [R] int32, at most lens - 1, and the bonus token [R] int64.
    """
    run, requests = operator(*_ACCEPT), window.shape[0]
    if run is None:
        rows = starts[:, None] + torch.arange(window.shape[1])
        choices = logits.argmax(-1)[rows.clamp(max=len(logits) - 1)]
        outcome = greedy.accept_greedy(window[:, 1:], choices, lens - 1)
        return outcome.accepted.int(), outcome.bonus
    window, lens, starts = window.contiguous(), lens.contiguous(), starts.contiguous()
    accepted = torch.empty(requests, dtype=torch.int32)
    bonus = torch.empty(requests, dtype=torch.int64)
    run(
        window.data_ptr(), *window.shape, lens.data_ptr(), starts.data_ptr(), logits.data_ptr(),
        logits.shape[1], accepted.data_ptr(), bonus.data_ptr(),
    )  # fmt: skip
    return accepted, bonus


def committed(
    drafts: Tensor, accepted: Tensor, bonus: Tensor, prefix: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a step's committed counts [R] int32, lengths [R] int64 and tokens [R, gamma + 1].

    drafts: [R, gamma] int64; accepted: [R] int32; bonus: [R] int64, placed after the accepted
    drafts (later entries are not read); prefix: [R] int64, lengths before the step.
    """
    commit = accepted + 1
    tokens = torch.nn.functional.pad(drafts, (0, 1))
    tokens.scatter_(1, accepted.long()[:, None], bonus[:, None])
    return commit, prefix + commit, tokens


def verify_chains(window: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Verify each request's chain up to the first token that differs from the draft.

    window: [R, n] int64, root and drafts. logits: [R * n, V] float32, contiguous; row r * n + k
    is the target's after window[r, k].
    Returns the likeliest token of each row read, 0 in the others, [R * n] int32; the rows read,
    -1 after them, [R, n] int32; tokens that a request gains, the bonus included, [R] int32.
    """
    requests, n = window.shape
    rows = torch.arange(requests * n, dtype=torch.int32).view(requests, n)
    accepted, bonus = accept_greedy(
        window, torch.full((requests,), n), torch.arange(0, requests * n, n), logits
    )
    gained, _, tokens = committed(window[:, 1:], accepted, bonus, accepted)
    read = torch.arange(n) < gained[:, None]
    return torch.where(read, tokens, 0).int().view(-1), torch.where(read, rows, -1), gained
