"""Greedy verification of drafted chains (EAGLE with topk 1, as in MTP-1) in one compiled call.

Stands for the greedy branch of `eagle_sample` and for `verify_tree_greedy`
(sglang/srt/speculative/eagle_utils.py, sglang/kernels/ops/speculative/spec_tree.py) where
every tree is a chain: there an argmax over all logits goes before some thirty small torch calls.
Here rows behind the first disagreement are not read.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_dspark.backends.cpu.greedy_ops import _argmax as argmax_of
from sglang_dspark.backends.cpu.jit import kernel


@kernel
def _verify(window, bits, predicted, index, lens):  # type: ignore[no-untyped-def]
    """window [R, n], bits [R * n, V] -> predicted [R * n], index [R, n], lens [R]."""
    n = window.shape[1]
    for r in range(window.shape[0]):
        for k in range(n):
            predicted[r * n + k], index[r, k] = 0, -1
        k = 0
        while True:
            token = argmax_of(bits[r * n + k])
            predicted[r * n + k], index[r, k] = token, r * n + k
            if k + 1 == n or token != window[r, k + 1]:
                break
            k += 1
        lens[r] = k + 1


def verify_chains(window: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The target's tokens along each request's chain, up to the first that is not the draft.

    window: [R, n] int64, root and drafts. logits: [R * n, V] float32, contiguous, row r * n + k
    being the target's after window[r, k].
    Returns the most likely token of each row read, 0 in the others, [R * n] int32; the rows read,
    -1 behind them, [R, n] int32; tokens a request gains, the bonus token included, [R] int32.
    """
    requests, n = window.shape
    predicted = torch.empty(requests * n, dtype=torch.int32)
    index = torch.empty(requests, n, dtype=torch.int32)
    lens = torch.empty(requests, dtype=torch.int32)
    bits = logits.view(torch.int32).numpy()
    _verify(window.numpy(), bits, predicted.numpy(), index.numpy(), lens.numpy())
    return predicted, index, lens
