"""Draft over a reduced vocabulary: multiply only the rows of the heads that can be drafted.

The draft's base logits U_k and its transition bias B(x_{k-1}) span the whole vocabulary, for each
of gamma positions. A drafter trained here may exclude most tokens by its own weights
(drafter/heads.py, `restrict_vocabulary`: a bias of -30 outside). Upstream
(sglang/srt/speculative/dspark_components/dspark_draft.py) computes all of them, and draws noise for
all of them even when every request is greedy. Here the rows inside are gathered once at load. A
sampled block returns logits of -inf outside: the probability there is exactly 0, in the
distribution that the tokens were drawn from, as verification requires.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sglang_dspark.backends.cpu import linear
from sglang_dspark.backends.cpu.greedy_ops import ARGMAX_BLOCK, order_key
from sglang_dspark.backends.cpu.jit import kernel, multiply_at
from sglang_dspark.backends.cpu.linear import product
from sglang_dspark.backends.cpu.weight_formats import take_rows
from sglang_dspark.drafter.heads import restricted_tokens
from sglang_dspark.float_ops import bits_of_float
from sglang_dspark.verify.rejection import sample_inverse_cdf


@kernel
def _likeliest(base, bias):  # type: ignore[no-untyped-def]
    """Return argmax(base + bias) of a row: base, bias [n]."""
    best, found = order_key(bits_of_float(base[0] + bias[0])), 0
    for start in range(0, bias.shape[0], ARGMAX_BLOCK):
        part, more = base[start : start + ARGMAX_BLOCK], bias[start : start + ARGMAX_BLOCK]
        top = order_key(bits_of_float(part[0] + more[0]))
        for i in range(more.shape[0]):
            key = order_key(bits_of_float(part[i] + more[i]))
            top = key if key > top else top
        if top > best:
            best, found = top, start
    while order_key(bits_of_float(base[found] + bias[found])) != best:
        found += 1
    return found


@kernel
def _draft(entry, w2, threads, block, base, anchor, w1, tokens, first, last, out):  # type: ignore[no-untyped-def]
    """Draft positions first..last-1 of blocks; `anchor` [R] is the token before the first.

    entry: of the matrix kernel for the format of W2, at the address w2.
    """
    requests, n, rank = base.shape[0], base.shape[2], w1.shape[1]
    latent = np.empty((requests, rank), np.float32)
    bias = np.empty((requests, n), np.float32)
    for k in range(first, last):
        for r in range(requests):
            latent[r] = w1[anchor[r] if k == first else out[r, k - 1]]
        multiply_at(
            entry, latent.ctypes.data, rank, requests, block, w2, n, rank,
            bias.ctypes.data, threads,
        )  # fmt: skip
        for r in range(requests):
            out[r, k] = tokens[_likeliest(base[r, k], bias[r])]


def draft_steps(
    base: Tensor,
    anchor: Tensor,
    weights: tuple[NDArray, Tensor, NDArray],
    out: Tensor,
    steps: range,
) -> None:
    """Fill out[:, steps], [R, gamma] int64, with the likeliest tokens of U_k + W1[x_{k-1}] W2^T.

    base [R, gamma, n] contiguous float32; anchor [R] int64, the token before the first of `steps`;
    weights: W1 [V, r] float32, W2 [n, r] in a format of weight_formats.py and token ids [n] int64,
    contiguous. W2 is `linear.eligible` and `linear.kernel_of` has a kernel for it.
    """
    w1, w2, tokens = weights
    kernel = linear.kernel_of(w2)
    assert kernel is not None
    threads = linear.threads_for(*w2.shape)
    _draft(
        kernel.entry, w2.data_ptr(), threads, linear.block_rows(base.shape[0]), base.numpy(),
        anchor.numpy(), w1, tokens, steps.start, steps.stop, out.numpy(),
    )  # fmt: skip


@dataclass(frozen=True)
class SeededWaits:
    """The e_v of verify/seeded.py for the requests of a draft block that have a seed.

    rows: [S] int64, their indices in the batch. waits: [S, gamma, n] float32 > 0.
    """

    rows: Tensor
    waits: Tensor


@dataclass(frozen=True)
class ReducedHead:
    """The rows of the LM head and of the vanilla Markov head that can be drafted.

    tokens: [n] ascending token ids. lm_head: [n, d]. w1: [V, r], the drafter's own, for every
    previous token. w2: [n, r], which each of gamma steps reads: in fewer bytes where the draft's
    layers are (weight_formats.py). Copies, except w1: weights updated in a running server
    reach the draft only after a restart, and the output stays the target's.
    """

    tokens: Tensor
    lm_head: Tensor
    w1: Tensor
    w2: Tensor

    @property
    def vocab_size(self) -> int:
        return self.w1.shape[0]

    @cached_property
    def arrays(self) -> tuple[NDArray, Tensor, NDArray]:
        """Return W1, W2 and tokens for `draft_steps` as views of the tensors."""
        return self.w1.numpy(), self.w2, self.tokens.numpy()

    @cached_property
    def supports_kernel(self) -> bool:
        """Return whether the compiled loop supports both factors."""
        row = torch.empty(1, self.w2.shape[1])
        return (
            linear.kernel_of(self.w2) is not None
            and self.w1.dtype is torch.float32
            and self.w1.is_cpu
            and self.w1.is_contiguous()
            and linear.eligible(row, self.w2)
        )


def reduced_head(
    w1: Tensor, w2: Tensor, lm_head: Tensor, packed: Callable[[Tensor], Tensor] = lambda w: w
) -> ReducedHead | None:
    """Reduce a vanilla head's weights [V, r] and the LM head [>= V, d]; None if not restricted.

    packed: converts W2's rows [n, r] to the stored format.
    """
    tokens = restricted_tokens(w1, w2)
    if tokens is None or tokens.numel() == w1.shape[0]:
        return None
    with torch.no_grad():
        return ReducedHead(
            tokens=tokens,
            lm_head=take_rows(lm_head.detach(), tokens),
            w1=w1.detach(),
            w2=packed(w2.detach()[tokens]),
        )


def base_logits(head: ReducedHead, hidden: Tensor) -> Tensor:
    """Compute base logits: hidden [R * gamma, d] -> U [R * gamma, n], columns `head.tokens`."""
    wide = hidden.dtype is torch.float32
    return product(hidden if wide else hidden.to(head.lm_head.dtype), head.lm_head)


def draft_greedy(
    head: ReducedHead,
    base: Tensor,
    anchor: Tensor,
    agree: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Draft the greedy block: base [R, gamma, n], anchor [R] int64 -> tokens [R, gamma] int64.

    agree: makes the ranks of a group draft the same token, [R] -> [R]; None for a single rank.
    """
    gamma = base.shape[1]
    out = torch.empty(base.shape[0], gamma, dtype=torch.int64)
    if not _compiled(head, base):
        previous = anchor
        for k in range(gamma):
            likeliest = head.tokens[(base[:, k] + _bias(head, previous)).argmax(-1)]
            previous = likeliest if agree is None else agree(likeliest)
            out[:, k] = previous
    elif agree is None:
        draft_steps(base, anchor, head.arrays, out, range(gamma))
    else:
        for k in range(gamma):
            previous = anchor if k == 0 else out[:, k - 1].contiguous()
            draft_steps(base, previous, head.arrays, out, range(k, k + 1))
            out[:, k] = agree(out[:, k].contiguous())
    return out


def _compiled(head: ReducedHead, base: Tensor) -> bool:
    """Return whether the compiled loop supports the head and base logits [R, gamma, n]."""
    return (
        head.supports_kernel
        and base.dtype is torch.float32
        and base.is_contiguous()
        and 0 < base.shape[0] <= linear.MAX_ROWS
    )


def draft_sampled(
    head: ReducedHead,
    base: Tensor,
    anchor: Tensor,
    temperatures: Tensor,
    uniforms: Tensor,
    agree: Callable[[Tensor], Tensor],
    seeded: SeededWaits | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample a block left to right; also return its logits, which define each distribution.

    base [R, gamma, n], anchor [R], temperatures [R] (0: the most likely token), uniforms
    [R, gamma] float64 in [0, 1) (`block_uniforms`), seeded: the waits of requests with a seed,
    which decide instead of the uniforms -> tokens [R, gamma] int64, logits U_k + B [R, gamma, V]
    before the temperature, -inf outside the draft vocabulary.
    """
    sampled = temperatures > 0
    temperature = torch.where(sampled, temperatures, 1.0)[:, None]
    logits = base.new_full((*base.shape[:2], head.vocab_size), -torch.inf)
    previous = anchor.long()
    drafted = []
    for k in range(base.shape[1]):
        step = base[:, k] + _bias(head, previous)
        logits[:, k].index_copy_(1, head.tokens, step)
        scaled = step / temperature  # [R, n]
        column = sample_inverse_cdf(torch.softmax(scaled, -1), uniforms[:, k])
        if seeded is not None:
            column[seeded.rows] = _first_arrival(scaled[seeded.rows], seeded.waits[:, k])
        column = torch.where(sampled, column, step.argmax(-1))
        previous = agree(head.tokens[column])
        drafted.append(previous)
    return torch.stack(drafted, 1), logits


def block_uniforms(key: int, offset: int, shape: tuple[int, int]) -> Tensor:
    """Draw the uniforms of one block [R, gamma], the same for a key and offset on every rank.

    float64 has 2^53 values, so a token is drafted with its probability to within 2^-53. Noise of
    each token in float32 is too coarse: an exponential that rounds to 0, as one in 2^23 did, wins
    for any probability of the token.
    """
    generator = np.random.Generator(np.random.Philox(key=[key % 2**64, offset % 2**64]))
    return torch.from_numpy(generator.random(shape))


def _first_arrival(scaled: Tensor, waits: Tensor) -> Tensor:
    """Return the column with the least e / p: logits / T and waits e > 0, [S, n] -> [S] int64."""
    return (scaled - waits.log()).argmax(-1)


def _bias(head: ReducedHead, previous: Tensor) -> Tensor:
    """Compute the transition bias of the draft vocabulary: previous [R] -> [R, n]."""
    return product(head.w1[previous], head.w2)
