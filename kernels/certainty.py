"""Estimate confidence from draft logits in one launch, for drafters without a confidence head.

log(p / (1 - p)) of the largest probability p of each draft position's distribution. With Z the sum
of exp((x - max) / T), p is 1 / Z, so the result is -log(Z - 1): a row is read once and no
probability is written. `sglang_dspark.drafter.draft_confidence` is the reference, and its docstring
says why admission by this value is lossless. Torch reads or writes a float32 copy of all logits six
times.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dspark.kernels.accept_rows import softmax_lanes, softmax_of

TYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAST_REST = 2.0**-24  # 1 - p where p rounds to 1, as in the reference
_BLOCK = 2048


def certainty_triton(
    logits: Tensor, temperature: Tensor, *, rows: int = 1, block: int = _BLOCK
) -> Tensor:
    """Return confidence logits [R, gamma] float32.

    logits: [R, gamma, n], rows contiguous, -inf for tokens that cannot be drafted. temperature: [R]
    float32, 0 for greedy requests, which count as 1. rows: of a program, block: tokens of a tile.
    NaN if a position has NaN logits or no token. Raises ValueError on shapes and types that do not
    fit.
    """
    requests, gamma, vocab = logits.shape
    if logits.dtype not in TYPES or logits.stride(2) != 1:
        raise ValueError(f"certainty: rows must be contiguous in {TYPES}, not {logits.dtype}")
    if temperature.shape != (requests,) or temperature.dtype != torch.float32:
        raise ValueError(
            f"certainty: {requests} requests need temperatures [{requests}] float32, not "
            f"{list(temperature.shape)} {temperature.dtype}"
        )
    out = torch.empty(requests, gamma, dtype=torch.float32, device=logits.device)
    if out.numel():
        _certainty_kernel[(triton.cdiv(out.numel(), rows),)](
            logits,
            temperature.contiguous(),
            out,
            out.numel(),
            *logits.stride()[:2],
            vocab,
            least=LEAST_REST,
            gamma=gamma,
            rows=rows,
            block=min(block, triton.next_power_of_2(vocab)),
            num_warps=8,
        )
    return out


@triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
def _certainty_kernel(
    logits, temperature, out, count, request_stride, row_stride, vocab,
    least: tl.constexpr, gamma: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0) * rows + tl.arange(0, rows)  # r gamma + k
    active = position < count
    request, place = (position // gamma).to(tl.int64), (position % gamma).to(tl.int64)
    scale = tl.load(temperature + request, mask=active, other=1.0)
    scale = tl.where(scale > 0, scale, 1.0)
    base = request * request_stride + place * row_stride
    top, _, total = softmax_lanes(logits, base, active, scale, vocab, rows, block)
    _, whole = softmax_of(top, total)  # at least 1, the likeliest token's own weight
    rest = whole - 1.0
    rest = tl.where(rest < least, least, rest).to(tl.float32)
    tl.store(out + position, tl.where(whole >= 1.0, -tl.log(rest), float("nan")), mask=active)
