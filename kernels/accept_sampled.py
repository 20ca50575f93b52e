"""Verify sampled windows without a tensor of probabilities (paper, 3.1, T > 0).

A row of logits is split among programs, a chunk each. One launch reads the target's and the
drafts' rows: maxima and sums of exponentials. With cuts a second reads the target's again and
counts weights by bin, a third finds how far down the cuts can reach, and a fourth lists the tokens
above in order, the candidates (`accept_chunks.py`). Then a program a row cuts its candidates,
finds the normaliser and judges the row's draft (`accept_verdicts.py`). At last the residual
max(p_t - p_d, 0) of the first rejected row, or p_t, is summed by chunks, and the correction or the
bonus drawn from it (`accept_draws.py`). Rows behind a request's verified ones are not read.
`accept_block.py` judges windows as a whole.

A row with more candidates than its list holds, 4,096 by default, is cut by one program that reads
all its logits some 17 times: exact, but slow. A top-p that keeps thousands of tokens is such a row.

The rules are those of `sglang_dspark.verify`, the reference: `rejection.accept_sampled` on
`sampling.sampled_distribution`, `greedy` for greedy requests, `seeded.accept_seeded` for those with
a seed. Outcomes are equal except where a uniform lies within rounding of a boundary: weights are
float32 and their sums float64 here, where torch rounds probabilities to float32. Chunks are the
same for any number of requests, and so is an outcome, bitwise.

Extra memory: `Scratch`, 93 MB at 256 requests of 8 rows and 152k tokens, 6 MB without cuts.
Probabilities in torch use 4 * V bytes a row, several times.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from sglang_dspark.kernels.accept_chunks import (
    bins_kernel,
    edge_kernel,
    list_kernel,
    softmax_kernel,
)
from sglang_dspark.kernels.accept_draws import draw_kernel
from sglang_dspark.kernels.accept_tiles import BINS, CHUNK_FIELDS, ROW_FIELDS
from sglang_dspark.kernels.accept_verdicts import judge_kernel
from sglang_dspark.kernels.accept_windows import DENSE, MIN_P, SEEDED, TOP_K, TOP_P, Windows, check

_CUTS = TOP_K | TOP_P | MIN_P


class Outcome(NamedTuple):
    """accepted: [R] int64, drafts kept. bonus: [R] int64, the target's token behind them."""

    accepted: Tensor
    bonus: Tensor


class Tiling(NamedTuple):
    """requests: of a program, more than one only where rows are short. block: tokens of a chunk and
    of a list. narrow: candidates that a row's judge reads at once. All powers of two."""

    requests: int = 1
    block: int = 4096
    num_warps: int = 8
    narrow: int = 1024


GPU = Tiling()


class Scratch(NamedTuple):
    """Memory between the launches; C chunks a row. chunked: [R, gamma + 1, CHUNK_FIELDS, C]
    float64. findings: [R, gamma + 1, ROW_FIELDS] float64. counts: [R, gamma + 1, C, BINS] int16,
    plan: [R, gamma + 1, C + 2] int32, tokens: int32 and weights: float32 [R, gamma + 1, block];
    empty without cuts."""

    chunked: Tensor
    findings: Tensor
    counts: Tensor
    plan: Tensor
    tokens: Tensor
    weights: Tensor


def accept_triton(given: Windows, arrivals: Tensor | None = None, how: Tiling = GPU) -> Outcome:
    """Accept the drafts of a step by the token rule.

    arrivals: [R or more] int32 zeros on the device, zeros again behind the launch, not to be
    shared by launches that overlap; None: made here.
    Raises ValueError on shapes or types that do not fit.
    """
    return launch(given, arrivals, how, by_block=False)


def launch(given: Windows, arrivals: Tensor | None, how: Tiling, *, by_block: bool) -> Outcome:
    """Accept the drafts of a step by either rule; arguments and errors of `accept_triton`.

    By the block rule drafts must have been drawn from logits.
    """
    check(given, arrivals)
    requests = len(given.drafts)
    device = given.drafts.device
    if arrivals is None:
        arrivals = torch.zeros(requests, dtype=torch.int32, device=device)
    found = Outcome(*(torch.empty(requests, dtype=torch.int64, device=device) for _ in range(2)))
    if requests:
        _launch(given, scratch_for(given, how), arrivals, found, how, by_block)
    return found


def scratch_for(given: Windows, how: Tiling) -> Scratch:
    """Allocate what a step's launches need; lists only for steps with cuts."""
    requests, gamma = given.drafts.shape
    block = _block(given, how)
    chunks = triton.cdiv(given.logits.shape[1], block)
    rows = requests * (gamma + 1)
    listed = rows if given.flags & _CUTS else 0

    def made(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=given.drafts.device)

    return Scratch(
        chunked=made(torch.float64, rows, CHUNK_FIELDS.value, chunks),
        findings=made(torch.float64, rows, ROW_FIELDS.value),
        counts=made(torch.int16, listed, chunks, BINS.value),
        plan=made(torch.int32, listed, chunks + 2),
        tokens=made(torch.int32, listed, block),
        weights=made(torch.float32, listed, block),
    )


def _block(given: Windows, how: Tiling) -> int:
    return min(how.block, triton.next_power_of_2(given.logits.shape[1]))


def _launch(
    given: Windows,
    scratch: Scratch,
    arrivals: Tensor,
    found: Outcome,
    how: Tiling,
    by_block: bool,
) -> None:
    requests, gamma = given.drafts.shape
    vocab, flags, block = given.logits.shape[1], given.flags, _block(given, how)
    parts, operands = triton.cdiv(vocab, block), given.operands()
    groups, row_stride = triton.cdiv(requests, how.requests), given.logits.stride(0)
    draft = given.draft_logits
    # Of absent ones too: other integers would compile anew.
    strides = (gamma * vocab, vocab) if draft is None else (draft.stride(0), draft.stride(1))
    sizes = {"requests": requests, "gamma": gamma, "vocab": vocab}
    sizes |= {"rows": how.requests, "block": block, "num_warps": how.num_warps}
    drafted = {"draft_stride": strides[0], "draft_row_stride": strides[1]}
    chunks = {"chunks": triton.next_power_of_2(parts)}
    narrow, dense = min(how.narrow, block), 2 if flags & DENSE else 1
    softmax_kernel[(groups, gamma + 1, dense * parts)](
        *operands, scratch.chunked, flags=flags, row_stride=row_stride, **sizes, **drafted
    )
    if flags & (_CUTS | SEEDED):
        bins_kernel[(groups, gamma + 1, parts)](
            *operands, scratch.chunked, scratch.counts, flags=flags, row_stride=row_stride,
            narrow=narrow, **sizes, **chunks,
        )  # fmt: skip
    if flags & _CUTS:
        _list(given, scratch, (groups, gamma + 1, parts), row_stride, {**sizes, **chunks})
    lists = (scratch.tokens, scratch.weights, scratch.findings)
    judge_kernel[(groups, gamma + 1)](
        *operands, scratch.chunked, scratch.plan, *lists, flags=flags, row_stride=row_stride,
        capacity=block, narrow=narrow, **sizes, **drafted, **chunks,
    )  # fmt: skip
    draw_kernel[(groups, gamma + 1 if by_block else 1, parts)](
        *operands, scratch.chunked, *lists, arrivals, *found, flags=flags,
        row_stride=row_stride, capacity=block, narrow=narrow, by_block=by_block, **sizes,
        **drafted, **chunks,
    )  # fmt: skip


def _list(
    given: Windows,
    scratch: Scratch,
    grid: tuple[int, int, int],
    row_stride: int,
    sizes: dict[str, int],
) -> None:
    """List the candidates of each row that is cut."""
    operands, block = given.operands(), sizes["block"]
    lengths, logits, temperatures = operands[1:4]
    top_k, top_p, min_p, greedy = *operands[6:9], operands[11]
    edge_kernel[grid[:2]](
        lengths, top_k, top_p, min_p, greedy, scratch.chunked, scratch.counts, scratch.plan,
        flags=given.flags, **sizes,
    )  # fmt: skip
    list_kernel[grid](
        lengths, logits, temperatures, scratch.chunked, scratch.plan, scratch.tokens,
        scratch.weights, row_stride=row_stride, capacity=block, **sizes,
    )  # fmt: skip
