"""A digest of what kernels compute, to compare compilations by.

python -m tests.backends.cpu.compiled_bits prints it, and how many kernels were read from disk; with
an argument, after a function that may reorder sums has called them.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import torch
from numba import njit

from sglang_dspark.backends.cpu import (
    accept,
    confidence,
    expert_ops,
    fused_ops,
    paged_attention,
)
from sglang_dspark.backends.cpu.attention_plan import make_plan
from sglang_dspark.drafter.hyper_connections import StreamRead
from sglang_dspark.float_ops import exp32

CONTEXTS = (20, 64, 200, 333)
HEADS, KV_HEADS, DIM, WIDTH = 9, 3, 64, 576
DRAFTS = 5
KERNELS = (
    fused_ops.rms_norm_rows,
    fused_ops.silu_and_mul_rows,
    accept._walk,
)


@njit(fastmath=True)
def _free(x, weight, gated, halved, out):  # type: ignore[no-untyped-def]
    fused_ops.rms_norm_rows(x, weight, 1e-5, out)
    fused_ops.silu_and_mul_rows(gated, halved)
    return exp32(out[0, 0])


def call_from_a_free_kernel() -> None:
    """The first call of all: what is compiled for it is what later callers get."""
    rows = np.ones((2, 2, WIDTH), np.float32)
    _free(rows[0], rows[0, 0], rows[1], rows[1, :, : WIDTH // 2].copy(), np.empty_like(rows[0]))


def digest() -> str:
    """Of attention in contexts of several lengths, norms, gates and rotations; of confidences,
    residual streams and the block rule."""
    torch.manual_seed(0)
    found = [*_attended(), *_rows(), *_drafted()]
    return hashlib.sha256(b"".join(each.tobytes() for each in found)).hexdigest()[:16]


def _attended() -> list[np.ndarray]:
    found = []
    table = torch.randperm(512).to(torch.int32)[None]
    keys, values = torch.randn(2, 512, KV_HEADS, DIM).unbind()
    for context in CONTEXTS:
        for queries in (1, 6):
            q = torch.randn(queries, HEADS, DIM)
            out = torch.empty_like(q)
            plan = make_plan(table, torch.tensor([0]), [queries], [context])
            paged_attention.paged_attention(
                q, keys, values, plan, scale=0.125, causal=True, window=paged_attention.NO_WINDOW,
                threads=1, out=out,
            )  # fmt: skip
            found.append(out.numpy())
    return found


def _rows() -> list[np.ndarray]:
    x, residual, normed, total, gated = torch.randn(5, 7, WIDTH).numpy()
    weight, cos_sin = torch.randn(WIDTH).numpy(), torch.randn(40, DIM).numpy()
    halved, heads, query = gated[:, : WIDTH // 2].copy(), x.copy(), x.copy()
    fused_ops.rms_norm_rows(x, weight, 1e-5, normed)
    second = np.empty_like(normed)
    fused_ops.add_rms_norm_rows(x, residual, weight, 1e-5, total, second)
    fused_ops.rms_norm_heads(heads, 1, 5, weight[:DIM], 1e-5)
    fused_ops.silu_and_mul_rows(gated, halved)
    fused_ops.rotate_rows(np.arange(7), cos_sin, query, residual.copy(), DIM)
    return [normed, total, second, heads, halved, query]


def _drafted() -> list[np.ndarray]:
    features, weight = torch.randn(2 * DRAFTS, WIDTH), torch.randn(1, WIDTH + 8)
    weights = confidence.ConfidenceWeights(weight, None, torch.randn(50, 8), torch.ones(1))
    anchor, drafts = torch.tensor([3, 40]), torch.randint(0, 50, (2, DRAFTS))
    survival, logits = confidence.confidence(weights, features, anchor, drafts)
    with torch.no_grad():
        read, projected = expert_ops.CompiledRead(StreamRead(4, WIDTH)).project(
            torch.randn(7, 4, WIDTH)
        )
    proposals = torch.randn(2, DRAFTS, WIDTH + 7).softmax(-1)
    targets = torch.randn(2, DRAFTS + 1, WIDTH + 7).softmax(-1)
    uniforms = torch.rand(2, DRAFTS, dtype=torch.float64)
    kept = accept.walk(drafts, proposals, targets, uniforms, torch.tensor([DRAFTS, 3]))
    return [each.numpy() for each in (survival, logits, projected, read, *kept)]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        call_from_a_free_kernel()
    print(digest(), sum(sum(kernel.stats.cache_hits.values()) for kernel in KERNELS))
