"""Run the sequential head's gamma steps over a batch in one launch (paper, 3.1.2).

x_k is drawn from softmax((U_k + B(x_{k-1})) / T), or is the argmax where T is 0. Programs own tiles
of the vocabulary and, a tile at a time, loop over the requests, so W2 is read once a step. Each
tile updates its request's best token by an atomic maximum of keys that order by value,
then by lowest token. After a step the programs meet at a counter, and all read the drawn tokens.
Heads that are not vanilla meet twice a step: first their inputs of W2 are computed, [R, r].
The last program to arrive writes the tokens and zeroes the next launch's counters.

Programs that meet must all be resident: at most one a multiprocessor, in a cooperative launch,
which the driver refuses if they do not fit. Triton's interpreter runs one program after the other;
there one does all steps, or many do one phase a launch (`Launch.split`).

Sampling is Gumbel-max over Philox words by key, token, request, position and block, those of
SGLang's step (sglang/kernels/ops/speculative/dspark/markov_sample.py): the same noise, and the
same draft except where rounding decides. Bias and sum are rounded as there, and `Blocks.logits`
contains the logits that were drawn from. The float64 reference is `markov_reference.py`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dspark.kernels.markov_blocks import Blocks, check
from sglang_dspark.kernels.markov_heads import column_of, judge, mix, previous, product
from sglang_dspark.kernels.rounding import narrowed

_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


class Drafts(NamedTuple):
    """tokens: [R, gamma] int64 token ids. confidence: [R, gamma] float32 logits of c_k, or None."""

    tokens: Tensor
    confidence: Tensor | None


class Launch(NamedTuple):
    """rows: requests of a product, block: tokens of a tile, ranks: depth of a product's step,
    powers of two from 16 on. rows None: by the batch. ranks None: 128 bytes of weights, with which
    every tile of 128 fits into 99 KiB, the shared memory of the smallest GPU. programs None: one a
    multiprocessor, or one without multiprocessors. split: a launch for each phase.
    """

    rows: int | None = None
    block: int = 128
    ranks: int | None = None
    num_warps: int = 8
    programs: int | None = None
    split: bool = False


_USUAL = Launch()
# On an H200 faster at every batch, by a tenth to a third (results/gpu_markov_tiles_h200.json).
LARGE = Launch(block=256, num_warps=16)
LARGE_BYTES = 160 * 1024  # of shared memory: A100, H100 and later ones for servers


def markov_triton(
    given: Blocks, scratch: Tensor | None = None, how: Launch | None = None
) -> Drafts:
    """Draft for every request; write `given.logits`.

    how: None: by the device.
    scratch: [1 + gamma * R or more] int64 zeros on the device, zeros again after the launch;
    launches that overlap must not share it; None: made here.
    Raises ValueError on shapes or types that do not fit, or for programs that would deadlock.
    """
    check(given, scratch)
    requests, gamma, width = given.base.shape
    device = given.base.device
    how = how or usual(device)
    programs = how.programs or _programs(device, triton.cdiv(width, how.block))
    if programs > 1 and not how.split and device.type != "cuda":
        raise ValueError("markov: programs that wait for each other need a GPU")
    if scratch is None:
        scratch = torch.zeros(1 + gamma * requests, dtype=torch.int64, device=device)
    tokens = torch.empty((requests, gamma), dtype=torch.int64, device=device)
    confidence = None
    if given.judge is not None:
        confidence = torch.empty((requests, gamma), dtype=torch.float32, device=device)
    if tokens.numel():
        _launch(given, scratch, Drafts(tokens, confidence), how, programs)
    return Drafts(tokens, confidence)


@lru_cache
def usual(device: torch.device) -> Launch:
    """Return the launch for a device's shared memory."""
    if device.type != "cuda":
        return _USUAL
    index = torch.cuda.current_device() if device.index is None else device.index
    here = triton.runtime.driver.active.utils.get_device_properties(index)
    return LARGE if here["max_shared_mem"] >= LARGE_BYTES else _USUAL


def _programs(device: torch.device, tiles: int) -> int:
    return min(_processors(device), tiles) if device.type == "cuda" else 1


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(given: Blocks, scratch: Tensor, found: Drafts, how: Launch, programs: int) -> None:
    """Run all phases in one launch, or one launch for each."""
    requests, gamma, width = given.base.shape
    rank, phases = given.w1.shape[1], gamma * (1 if given.mixing is None else 2)
    deepest = how.ranks or depth_of(given.w1.dtype)
    depth = 0 if given.judge is None else given.judge.features.shape[-1]
    options: dict[str, Any] = {
        "recurrent": given.mixing is not None and given.mixing.recurrent,
        "scattered": given.logits is not None and given.draft_ids is not None,
        "with_markov": given.judge is not None and len(given.judge.weight) > depth,
        "step_type": _TYPES[given.step_dtype],
        "interpreted": not given.base.is_cuda,
        "rows": how.rows or min(64, max(16, triton.next_power_of_2(requests))),
        "block": how.block,
        "ranks": min(deepest, max(16, triton.next_power_of_2(rank))),
        "num_warps": how.num_warps,
    }
    if programs > 1 and not how.split:
        options["launch_cooperative_grid"] = True
    arguments = (*_operands(given), scratch, *found, requests, gamma, width, rank, depth)
    spans = [(k, k + 1) for k in range(phases)] if how.split else [(0, phases)]
    for first, stop in spans:
        _markov_kernel[(programs,)](*arguments, *_strides(given), first, stop, **options)


def depth_of(dtype: torch.dtype) -> int:
    """Return the ranks of a product's step over weights of a type, unless `Launch` sets them."""
    return 128 // dtype.itemsize


def _operands(given: Blocks) -> tuple[Any, ...]:
    """Return the kernel's operands, up to its scratch."""
    mixing, confidence, noise, w2 = given.mixing, given.judge, given.noise, given.w2
    states = latents = None
    if mixing is not None:
        requests, rank = len(given.base), w2.shape[1]
        latents = torch.empty((requests, rank), dtype=w2.dtype, device=w2.device)
        if mixing.recurrent:
            states = torch.empty((2, requests, rank), dtype=torch.float32, device=w2.device)
    return (
        given.base,
        given.anchors,
        given.w1,
        w2,
        given.draft_ids,
        given.temperatures,
        *((None, 0) if noise is None else (noise.offset, noise.key)),
        given.logits,
        *((None, None) if mixing is None else (mixing.from_hidden, mixing.weight)),
        states,
        latents,
        *((None,) * 3 if confidence is None else vars(confidence).values()),
    )


def _strides(given: Blocks) -> tuple[int, ...]:
    logits, mixing, confidence = given.logits, given.mixing, given.judge
    return (
        *given.base.stride()[:2],
        given.anchors.stride(0),
        *((0, 0) if logits is None else logits.stride()[:2]),
        *((0, 0) if mixing is None else mixing.from_hidden.stride()[:2]),
        0 if mixing is None else mixing.weight.stride(0),
        *((0, 0) if confidence is None else confidence.features.stride()[:2]),
    )


@triton.jit
def _markov_kernel(
    base, anchors, w1, w2, ids, temperatures, offset, key, logits, from_hidden, weight, states,
    latents, features, judge_weight, judge_bias, scratch, tokens, confidence,
    requests, gamma, width, rank, depth, base_stride, base_step, anchor_stride, logits_stride,
    logits_step, hidden_stride, hidden_step, weight_stride, feature_stride, feature_step,
    first, stop, recurrent: tl.constexpr, scattered: tl.constexpr, with_markov: tl.constexpr,
    step_type: tl.constexpr, interpreted: tl.constexpr, rows: tl.constexpr, block: tl.constexpr,
    ranks: tl.constexpr,
):  # fmt: skip
    meetings: tl.constexpr = 1 if weight is None else 2  # phases of a step
    best = scratch + 1  # [gamma, R] keys of `highest`, 0 before the first
    drawn = (best, anchors, anchor_stride, ids, requests)
    mixing = (from_hidden, hidden_stride, hidden_step, weight, weight_stride)
    kept = (logits, logits_stride, logits_step)
    noise = (temperatures, key, offset)
    for phase in range(first, stop):
        step = phase // meetings
        if weight is not None and phase % 2 == 0:
            mix(step, drawn, w1, mixing, states, latents, rank, recurrent, interpreted,
                rows, ranks)  # fmt: skip
        if (phase + 1) % meetings == 0:
            _choose(step, drawn, base, base_stride, base_step, w1, w2, latents, kept, noise,
                    width, rank, scattered, step_type, interpreted, rows, block, ranks)  # fmt: skip
            if features is not None:
                judge(step, drawn, w1, features, feature_stride, feature_step, judge_weight,
                      judge_bias, confidence, gamma, rank, depth, with_markov, interpreted,
                      1024)  # fmt: skip
        if phase + 1 < stop:
            _meet(scratch, (phase + 1 - first) * tl.num_programs(0))
    tl.debug_barrier()  # all of a program's keys are in place before it arrives
    arrived = tl.atomic_add(scratch, 1, sem="acq_rel") + 1
    if arrived == (stop - first) * tl.num_programs(0):
        tl.store(scratch, 0)
        if stop == gamma * meetings:
            _finish(best, ids, tokens, requests, gamma, 256)


@triton.jit
def _meet(counter, goal):
    """Wait until all programs arrive; data that they wrote before can be read after it."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counter, 1, sem="acq_rel") + 1
    while arrived < goal:
        arrived = tl.atomic_add(counter, 0, sem="acq_rel")
    tl.debug_barrier()


@triton.jit
def _choose(
    step, drawn, base, base_stride, base_step, w1, w2, latents, kept, noise, width, rank,
    scattered: tl.constexpr, step_type: tl.constexpr, interpreted: tl.constexpr,
    rows: tl.constexpr, block: tl.constexpr, ranks: tl.constexpr,
):  # fmt: skip
    """Update the best token of every request at this step; store logits if they are saved."""
    best, requests = drawn[0], drawn[4]
    for tile in range(tl.program_id(0), tl.cdiv(width, block), tl.num_programs(0)):
        column = tile * block + tl.arange(0, block)
        for start in range(0, requests, rows):
            r = start + tl.arange(0, rows)
            inside, row = r < requests, r.to(tl.int64)
            known = inside[:, None] & (column < width)[None, :]
            if latents is None:
                bias = product(
                    w1, previous(drawn, step, r, inside), inside, w2, column, column < width,
                    rank, rank, interpreted, rows, block, ranks,
                )  # fmt: skip
            else:
                bias = product(
                    latents, row, inside, w2, column, column < width,
                    rank, rank, interpreted, rows, block, ranks,
                )  # fmt: skip
            bias = narrowed(bias, w2.dtype.element_ty, interpreted).to(tl.float32)
            at = row[:, None] * base_stride + step * base_step + column[None, :]
            own = tl.load(base + at, mask=known, other=0.0).to(tl.float32)
            own = narrowed(own + bias, step_type, interpreted)
            _keep(own, kept, drawn[3], row, step, column, known, width, scattered)
            value = own.to(tl.float32)
            if noise[0] is not None:
                value = _raced(value, noise, step, r, inside, tile, rows, block)
            key = highest(value, column[None, :], known)
            tl.atomic_max(best + step * requests + r, key, mask=inside, sem="relaxed")


@triton.jit
def _keep(own, kept, ids, row, step, column, known, width, scattered: tl.constexpr):
    """Store a tile's logits if they are saved, by token id if scattered."""
    logits, stride, step_stride = kept
    if logits is not None:
        place = column
        if scattered:
            place = tl.load(ids + column, mask=column < width, other=0)
        at = row[:, None] * stride + step * step_stride + place[None, :]
        tl.store(logits + at, own, mask=known)


@triton.jit
def highest(value, column, known):
    """Return the largest key (int64 > 0) of each row: keys order by value, then by lowest column;
    NaN first, as in torch's argmax. 0 where no token is known."""
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    bits = tl.where(value != value, 0x7FC00000, bits)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # integers in the order of their floats
    order = tl.where(known, order, -2147483648)  # below all of them
    top = tl.max(order, 1)
    lowest = tl.min(tl.where(order == top[:, None], column, 2147483647), 1)
    key = ((top.to(tl.int64) + 2147483648) << 31) | (2147483647 - lowest).to(tl.int64)
    return tl.where(top == -2147483648, 0, key)


@triton.jit
def _raced(value, noise, step, r, inside, tile, rows: tl.constexpr, block: tl.constexpr):
    """Return value / T - log e for requests with a temperature T, whose maximum is a draw from
    softmax(value / T); else the value."""
    temperatures, key, offset = noise
    temperature = tl.load(temperatures + r, mask=inside, other=0.0)
    hot = temperature != 0
    if tl.max(hot.to(tl.int32), 0) > 0:
        wait = waits(key, offset, step, r, tile, rows, block)
        scale = tl.where(hot, temperature, 1.0)[:, None]
        scaled = tl.div_rn(value, tl.broadcast_to(scale, (rows, block)))
        value = tl.where(hot[:, None], scaled - tl.log(wait), value)
    return value


@triton.jit
def waits(key, offset, step, r, tile, rows: tl.constexpr, block: tl.constexpr):
    """Return exponential variables e [rows, block] float32 of a tile's tokens; word k of a Philox
    call is that of token 4 q + k.

    -log(1 - u) by its series where u is small: the smallest e decide, and a GPU's fast logarithm
    is not precise near 1.
    """
    zero = tl.zeros((rows, block // 4), tl.uint32)
    quad = (tile * (block // 4) + tl.arange(0, block // 4)).to(tl.uint32)
    count = (tl.load(offset) & 0xFFFFFFFF).to(tl.uint32)
    a, b, c, d = tl.philox(
        key, zero + quad[None, :], zero + r.to(tl.uint32)[:, None], zero + step.to(tl.uint32),
        zero + count, 10,
    )  # fmt: skip
    word = tl.interleave(tl.interleave(a, c), tl.interleave(b, d))
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # in (0, 1]
    tail = 1.0 / 3.0 + u * (0.25 + u * (0.2 + u * (1.0 / 6.0)))
    series = u * (1.0 + u * (0.5 + u * tail))
    return tl.where(u < 0.0625, series, -tl.log(1.0 - u))


@triton.jit
def _finish(best, ids, tokens, requests, gamma, block: tl.constexpr):
    """Write the tokens of all steps, and zeros for the next launch."""
    for start in range(0, requests * gamma, block):
        at = start + tl.arange(0, block)
        known = at < requests * gamma
        chosen = tl.load(best + at, mask=known, other=2147483647, cache_modifier=".cg")
        token = column_of(chosen)
        if ids is not None:
            token = tl.load(ids + token, mask=known, other=0)
        tl.store(tokens + (at % requests) * gamma + at // requests, token, mask=known)
        tl.store(best + at, tl.zeros([block], tl.int64), mask=known)
