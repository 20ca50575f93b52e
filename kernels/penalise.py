"""Penalise the verify windows of a step in place, in one launch.

Plain decoding penalises a row by the output tokens before it (sglang/srt/sampling/penaltylib). In a
window the drafts before a row count too. A program has a tile of one request's vocabulary: it
reads the tile's counts once, then penalises that tile of each row from the anchor's on. The
reference, `sglang_dspark.verify.penalties.penalise_windows`, makes some twenty launches a row and
holds float32 copies of all of them. Results are bitwise equal.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sglang_dspark.kernels.rounding import narrowed

_BLOCK = 1024  # tokens of a program


def penalise_triton(
    logits: Tensor,
    rows: Tensor,
    window: Tensor,
    table: Tensor,
    slots: Tensor,
    outputs: Tensor,
    penalties: Any,
) -> None:
    """Penalise the logits of P requests' windows in place.

    logits: [R, W, V] float32, bfloat16 or float16, rows contiguous. rows: [P] int64, the requests'
    places among R. window: [R, W] int64, anchors and drafts. table: [slots, V] int32, counts of
    output tokens, anchors included. slots: [P] int64, the requests' rows of the table. outputs: [P]
    int64, number of output tokens. penalties: `verify.penalties.Penalties` of the P requests.
    Raises ValueError on shapes and types that do not fit.
    """
    _require(logits, rows, window, table, slots, outputs, penalties.stops)
    width, vocab = logits.shape[1:]
    numbers = (penalties.frequency, penalties.presence, penalties.repetition)
    tensors = (logits, rows, window, table, slots, outputs, *numbers, penalties.minimum)
    _penalise_kernel[(len(rows), triton.cdiv(vocab, _BLOCK))](
        *tensors,
        penalties.stops,
        vocab,
        penalties.stops.shape[1],
        *logits.stride()[:2],
        window.stride(0),
        table.stride(0),
        *(each.stride(0) for each in numbers),
        width=width,
        block=_BLOCK,
        interpreted=bool(triton.knobs.runtime.interpret),
        enable_fp_fusion=False,  # x - f n is rounded twice, as in the reference
    )


def _require(
    logits: Tensor,
    rows: Tensor,
    window: Tensor,
    table: Tensor,
    slots: Tensor,
    outputs: Tensor,
    stops: Tensor,
) -> None:
    if logits.shape[:2] != window.shape or logits.shape[2] != table.shape[1]:
        raise ValueError(
            f"penalise: logits {list(logits.shape)} need a window [R, W] and counts [slots, V], "
            f"not {list(window.shape)} and {list(table.shape)}"
        )
    if not len(rows) == len(slots) == len(outputs) == len(stops):
        raise ValueError(
            "penalise: places, slots, numbers of output tokens and stops differ in length: "
            f"{len(rows)}, {len(slots)}, {len(outputs)}, {len(stops)}"
        )
    contiguous = all(each.stride(-1) == 1 for each in (logits, window, table))
    contiguous &= stops.is_contiguous()
    wanted = (torch.int64, torch.int64, torch.int32)
    if not contiguous or (rows.dtype, window.dtype, table.dtype) != wanted:
        raise ValueError(
            "penalise: places and window must be int64, counts int32, rows contiguous: "
            f"{rows.dtype}, {window.dtype}, {table.dtype}"
        )


@triton.jit(do_not_specialize=["stop_count"])  # type: ignore[untyped-decorator]  # steps differ
def _penalise_kernel(
    logits, rows, window, table, slots, outputs,
    frequency, presence, repetition, minimum, stops,
    vocab, stop_count, request_stride, row_stride, window_stride, table_stride,
    frequency_stride, presence_stride, repetition_stride,
    width: tl.constexpr, block: tl.constexpr, interpreted: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * block + tl.arange(0, block)
    inside = token < vocab
    row = tl.load(rows + p)
    counts = table + tl.load(slots + p) * table_stride
    seen = tl.load(counts + token, mask=inside, other=0).to(tl.float32)
    per_token = tl.load(frequency + p * frequency_stride)
    once_only = tl.load(presence + p * presence_stride)
    factor = tl.broadcast_to(tl.load(repetition + p * repetition_stride), seen.shape)
    emitted, least = tl.load(outputs + p), tl.load(minimum + p)
    for place in range(width):
        draft = tl.load(window + row * window_stride + place)
        seen += ((token == draft) & (place > 0)).to(tl.float32)
        at = logits + row * request_stride + place * row_stride + token
        x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        once = seen > 0
        x = x - per_token * seen
        x = x - once_only * once.to(tl.float32)
        for each in range(stop_count):
            stop = tl.load(stops + p * stop_count + each)
            x = tl.where((token == stop) & (emitted + place < least), float("-inf"), x)
        scaled = tl.where(x < 0, x * factor, tl.div_rn(x, factor))
        x = tl.where(once, scaled, x)
        tl.store(at, narrowed(x, logits.dtype.element_ty, interpreted), mask=inside)
