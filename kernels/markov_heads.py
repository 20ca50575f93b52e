"""Compute the previous token's part of `markov_sample.py`.

Products with W1[x_{k-1}], the inputs of W2 of gated and recurrent heads, and the confidence
(`sglang_dspark.drafter.heads`, `confidence`).

`drawn` holds the inputs of the previous token: the best keys of each step and request, the
anchors and their stride, the token ids of a reduced vocabulary, the number of requests.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sglang_dspark.kernels.rounding import narrowed


@triton.jit
def column_of(best):
    """Return the column of a key of `markov_sample.highest`."""
    return 2147483647 - (best & 2147483647)


@triton.jit
def previous(drawn, step, r, inside):
    """Return x_{k-1} (int64) of requests r: the anchor, or the previous step's choice."""
    best, anchors, anchor_stride, ids, requests = drawn
    anchor = tl.load(anchors + r * anchor_stride, mask=inside & (step == 0), other=0)
    later = inside & (step > 0)
    chosen = tl.load(
        best + (step - 1) * requests + r, mask=later, other=2147483647, cache_modifier=".cg"
    )
    token = column_of(chosen)
    if ids is not None:
        token = tl.load(ids + token, mask=later, other=0)
    return tl.where(step == 0, anchor, token)


@triton.jit
def product(
    source, row, inside, weight, column, known, weight_stride, depth,
    interpreted: tl.constexpr, rows: tl.constexpr, block: tl.constexpr, ranks: tl.constexpr,
):  # fmt: skip
    """Compute source[row] weight[column]^T, [rows, block] float32; zeros for rows not inside.

    source: [*, depth] contiguous. Weights are first in the product, as in `grouped_weights.py`.
    """
    acc = tl.zeros((block, rows), tl.float32)
    for at in range(0, depth, ranks):
        k = at + tl.arange(0, ranks)
        deep = (k < depth)[None, :]
        w = tl.load(
            weight + column.to(tl.int64)[:, None] * weight_stride + k[None, :],
            mask=known[:, None] & deep,
            other=0.0,
        )
        x = tl.load(
            source + row[:, None] * depth + k[None, :],
            mask=inside[:, None] & deep,
            other=0.0,
            cache_modifier=".cg",  # another program may have written it in this launch
        )
        if source.dtype.element_ty != weight.dtype.element_ty:
            x = narrowed(x.to(tl.float32), weight.dtype.element_ty, interpreted)
        if interpreted:  # the interpreter multiplies the bit patterns of BF16
            w, x = w.to(tl.float32), x.to(tl.float32)
        acc = tl.dot(w, tl.trans(x), acc, input_precision="ieee")
    return tl.trans(acc)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    return 2.0 * sigmoid(2.0 * x) - 1.0


@triton.jit
def mix(
    step, drawn, w1, mixing, states, latents, rank, recurrent: tl.constexpr,
    interpreted: tl.constexpr, rows: tl.constexpr, ranks: tl.constexpr,
):  # fmt: skip
    """Compute the input of W2 of every request, [R, r], and the state after it.

    states: [2, R, r] float32, one read and one written in turn; the first step's state is zero.
    """
    requests, parts = drawn[4], tl.cdiv(rank, ranks)
    items = tl.cdiv(requests, rows) * parts
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        r = (item // parts) * rows + tl.arange(0, rows)
        j = (item % parts) * ranks + tl.arange(0, ranks)
        inside, row = r < requests, r.to(tl.int64)
        known = inside[:, None] & (j < rank)[None, :]
        place = row[:, None] * rank + j[None, :]
        came = (row, inside, previous(drawn, step, r, inside), j, known)
        before = None
        if recurrent:
            before = states + (step % 2) * requests * rank
        gate = sigmoid(projected(0, step, came, w1, mixing, before, rank, interpreted, rows, ranks))
        if recurrent:
            new = tanh(projected(1, step, came, w1, mixing, before, rank, interpreted, rows, ranks))
            latent = tanh(
                projected(2, step, came, w1, mixing, before, rank, interpreted, rows, ranks)
            )
            old = known & (step > 0)
            state = tl.load(before + place, mask=old, other=0.0, cache_modifier=".cg")
            after = states + ((step + 1) % 2) * requests * rank
            tl.store(after + place, gate * state + (1.0 - gate) * new, mask=known)
        else:
            own = tl.load(w1 + came[2][:, None] * rank + j[None, :], mask=known, other=0.0)
            latent = gate * own.to(tl.float32)
        tl.store(latents + place, narrowed(latent, latents.dtype.element_ty, interpreted), known)


@triton.jit
def projected(
    part, step, came, w1, mixing, before, rank,
    interpreted: tl.constexpr, rows: tl.constexpr, ranks: tl.constexpr,
):  # fmt: skip
    """Compute outputs j of the `part`-th r of the head's projection, [rows, ranks] float32.

    before: the states of a recurrent head, else None.
    """
    from_hidden, hidden_stride, hidden_step, weight, weight_stride = mixing
    row, inside, token, j, known = came
    column = part * rank + j
    at = row[:, None] * hidden_stride + step * hidden_step + column[None, :]
    total = tl.load(from_hidden + at, mask=known, other=0.0).to(tl.float32)
    of_token = weight
    if before is not None:
        of_token = weight + rank
        old = inside & (step > 0)
        total += product(
            before, row, old, weight, column, j < rank, weight_stride, rank,
            interpreted, rows, ranks, ranks,
        )  # fmt: skip
    return total + product(
        w1, token, inside, of_token, column, j < rank, weight_stride, rank,
        interpreted, rows, ranks, ranks,
    )  # fmt: skip


@triton.jit
def judge(
    step, drawn, w1, features, feature_stride, feature_step, weight, bias, confidence,
    gamma, rank, depth, with_markov: tl.constexpr, interpreted: tl.constexpr, chunk: tl.constexpr,
):  # fmt: skip
    """Compute the confidence logits of this step, one request after the other."""
    requests = drawn[4]
    for r in range(tl.program_id(0), requests, tl.num_programs(0)):
        row = tl.zeros([1], tl.int64) + r
        total = tl.zeros([chunk], tl.float32)
        for at in range(0, depth, chunk):
            d = at + tl.arange(0, chunk)
            h = features + row * feature_stride + step * feature_step + d
            x = tl.load(h, mask=d < depth, other=0.0).to(tl.float32)
            total += x * tl.load(weight + d, mask=d < depth, other=0.0)
        if with_markov:
            token = previous(drawn, step, row, row >= 0)
            for at in range(0, rank, chunk):
                j = at + tl.arange(0, chunk)
                own = tl.load(w1 + token * rank + j, mask=j < rank, other=0.0).to(tl.float32)
                own = narrowed(own, features.dtype.element_ty, interpreted).to(tl.float32)
                total += own * tl.load(weight + depth + j, mask=j < rank, other=0.0)
        tl.store(confidence + r * gamma + step, tl.sum(total, 0) + tl.load(bias))
