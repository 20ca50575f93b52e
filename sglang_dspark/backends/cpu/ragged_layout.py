"""Build SGLang's `RaggedVerifyLayout` from verify lengths, and the row numbers of such a step.

Upstream: sglang/srt/speculative/ragged_verify.py and kernels/ops/speculative/dspark/
dspark_verify_window.py. Its `verify_lens` count the anchor as well; ours do not.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.backends.cpu.jit import kernel
from sglang_dspark.schedule.budget import Counts
from sglang_dspark.serving import upstream

CACHED_LAYOUTS = 1024


def layout_of(lengths: Counts) -> Any:
    """Build upstream's layout of admitted drafts by request, [R] int64, without padding.

    Cached and read-only: few requests have few layouts, which recur."""
    return _layout(tuple(lengths.tolist()))


@lru_cache(maxsize=CACHED_LAYOUTS)
def _layout(lengths: tuple[int, ...]) -> Any:
    windows = np.asarray(lengths, np.int64) + 1
    ends = np.cumsum(windows)
    indptr = np.zeros(len(windows) + 1, np.int32)
    indptr[1:] = ends
    total = int(ends[-1])
    return upstream.RaggedVerifyLayout(
        verify_lens=torch.from_numpy(windows.astype(np.int32)),
        graph_num_tokens=total,
        extend_start_loc=torch.from_numpy(indptr[:-1].copy()),
        qo_indptr_device=torch.from_numpy(indptr),
        verify_lens_cpu=windows.tolist(),
        total_verify_tokens=total,
    )


class PackedRows:
    """The rows of a ragged step: lens, starts [R] int64 in the pass, `index` [N] in windows."""

    def __init__(self, windows: Counts, width: int):
        """Index the rows of windows [R] int64: verified tokens of each request, anchor included."""
        self.total = int(windows.sum())
        self.lens = torch.from_numpy(windows)
        self.starts = torch.from_numpy(first_rows(windows))
        self.strided = torch.arange(len(windows)) * width  # first rows of whole windows
        self.index = rows_of(self.strided, self.lens, self.total)


@lru_cache(maxsize=CACHED_LAYOUTS)
def layout_without_drafts(requests: int) -> Any:
    """Build the layout of a step that verifies no draft."""
    return layout_of(np.zeros(requests, np.int64))


def rows_in(layout: Any, width: int) -> PackedRows:
    """Return the rows of a layout in windows of `width`."""
    return _rows(tuple(layout.verify_lens_cpu), width)


@lru_cache(maxsize=CACHED_LAYOUTS)
def _rows(windows: tuple[int, ...], width: int) -> PackedRows:
    return PackedRows(np.asarray(windows, np.int64), width)


def packed_window(
    rows: PackedRows, draft_block_ids: Tensor, draft_tokens: Tensor, verify_window: Any
) -> Any:
    """Build upstream's `RaggedVerifyWindow` of the packed rows.

    draft_block_ids [R, >= 1], the anchor first; draft_tokens [R, gamma]; verify_window: the
    step's positions and cache slots of all gamma + 1 places.
    """
    if rows.total == len(rows.lens):
        ids = draft_block_ids[:, 0].clone()
    else:
        candidates = torch.cat([draft_block_ids[:, :1], draft_tokens], dim=1)
        ids = candidates.reshape(-1)[rows.index]
    return upstream.RaggedVerifyWindow(
        positions=verify_window.positions_2d.reshape(-1)[rows.index],
        verify_cache_loc=verify_window.verify_cache_loc[rows.index],
        verify_ids=ids,
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


def first_rows(lens: np.ndarray) -> np.ndarray:
    """Return the first packed row of each request: lens [R] int64 -> [R] int64."""
    return np.cumsum(lens) - lens
