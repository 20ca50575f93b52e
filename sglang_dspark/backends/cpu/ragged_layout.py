"""Build SGLang's `RaggedVerifyLayout` from verify lengths, and the row numbers of such a step.

Upstream: sglang/srt/speculative/ragged_verify.py and kernels/ops/speculative/dspark/
dspark_verify_window.py. Its `verify_lens` count the anchor as well; ours do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.backends.cpu.jit import kernel
from sglang_dspark.serving import upstream

CACHED_LAYOUTS = 1024


@lru_cache(maxsize=CACHED_LAYOUTS)
def layout_of(lengths: tuple[int, ...]) -> Any:
    """Build upstream's layout of the drafts admitted of each request, without padding.

    Cached and read-only: few requests have few layouts, which recur.
    """
    windows = np.asarray(lengths, np.int32) + 1
    indptr = np.zeros(len(windows) + 1, np.int32)
    np.cumsum(windows, out=indptr[1:])
    total = int(indptr[-1])
    return upstream.RaggedVerifyLayout(
        verify_lens=torch.from_numpy(windows),
        graph_num_tokens=total,
        extend_start_loc=torch.from_numpy(indptr[:-1].copy()),
        qo_indptr_device=torch.from_numpy(indptr),
        verify_lens_cpu=windows.tolist(),
        total_verify_tokens=total,
    )


class PackedRows:
    """The rows of a ragged step: lens, starts [R] int64 in the pass, `index` [N] in windows."""

    def __init__(self, windows: Sequence[int], width: int):
        """Index the rows of windows [R]: verified tokens of each request, anchor included."""
        lens = np.asarray(windows, np.int64)
        self.lens, self.total = torch.from_numpy(lens), int(lens.sum())
        self.starts = torch.from_numpy(np.cumsum(lens) - lens)
        self.strided = torch.arange(len(windows)) * width  # first rows of whole windows
        self.index = rows_of(self.strided, self.lens, self.total)


_rows = lru_cache(maxsize=CACHED_LAYOUTS)(PackedRows)


def rows_in(layout: Any, width: int) -> PackedRows:
    """Return the rows of a layout in windows of `width`."""
    return _rows(tuple(layout.verify_lens_cpu), width)


def packed_window(rows: PackedRows, ids: Tensor, verify_window: Any) -> Any:
    """Build upstream's `RaggedVerifyWindow` of the packed rows.

    ids: [R, gamma + 1] anchors and drafts; verify_window: their positions and cache slots.
    """
    return upstream.RaggedVerifyWindow(
        positions=verify_window.positions_2d.reshape(-1)[rows.index],
        verify_cache_loc=verify_window.verify_cache_loc[rows.index],
        verify_ids=ids.reshape(-1)[rows.index],
        window_index=rows.index,
    )


@kernel
def _fill_rows(starts, lens, out):  # type: ignore[no-untyped-def]
    taken = 0
    for r in range(starts.shape[0]):
        for k in range(lens[r]):
            out[taken] = starts[r] + k
            taken += 1


def rows_of(starts: Tensor, lens: Tensor, total: int) -> Tensor:
    """List row numbers starts[r] .. starts[r] + lens[r] - 1 of all requests, [total] int64.

    starts: [R] int64. lens: [R] integers that add up to `total`.
    """
    out = torch.empty(total, dtype=torch.int64)
    _fill_rows(starts.numpy(), lens.numpy(), out.numpy())
    return out
