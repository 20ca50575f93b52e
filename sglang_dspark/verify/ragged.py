"""Layout of a ragged verify pass: R windows of 1 + l_r tokens in one flat batch (paper, 3.3).

A window is the anchor and the l_r drafts admitted for its request. SGLang's `verify_lens` count
the anchor as well (sglang/srt/speculative/ragged_verify.py); ours are l_r, the drafts alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RaggedLayout:
    """Layout of the tokens of a ragged verify pass; made by `from_verify_lens`.

    gamma: block size. verify_lens: [R] int64, l_r in 0..gamma.
    cu_seqlens: [R + 1] int64, window r is flat[cu_seqlens[r] : cu_seqlens[r + 1]].
    request: [B] int64, token -> r. offset: [B] int64, token -> 0..l_r inside its window.
    """

    gamma: int
    verify_lens: Tensor
    cu_seqlens: Tensor
    request: Tensor
    offset: Tensor

    def __post_init__(self) -> None:
        rows, total = self.verify_lens.shape[0], self.request.shape[0]
        lengths = self.cu_seqlens.diff()
        assert self.cu_seqlens.shape == (rows + 1,), "cu_seqlens must be [R + 1]"
        assert int(self.cu_seqlens[0]) == 0, "cu_seqlens starts at 0"
        assert int(self.cu_seqlens[-1]) == total, "cu_seqlens ends at B"
        assert bool((lengths == self.verify_lens + 1).all()), "a window is 1 + l_r tokens"
        assert bool((lengths >= 1).all()), "every window holds its anchor"
        assert bool((lengths <= self.gamma + 1).all()), "no window exceeds 1 + gamma"
        assert self.offset.shape == (total,), "offset must be [B]"
        expected = torch.arange(total, device=self.request.device) - self.cu_seqlens[self.request]
        assert bool((self.offset == expected).all()), "offset counts from the window's start"

    @classmethod
    def from_verify_lens(cls, verify_lens: Tensor, gamma: int) -> RaggedLayout:
        """Build the layout from l_r.

        verify_lens: [R] integer, drafts admitted, each in 0..gamma.
        Raises ValueError on another shape or a length out of range.
        """
        if verify_lens.dim() != 1:
            raise ValueError(f"verify_lens must be [R], got {tuple(verify_lens.shape)}")
        lens = verify_lens.to(torch.int64)
        if bool(((lens < 0) | (lens > gamma)).any()):
            raise ValueError(f"verify lengths must lie in 0..{gamma}: {lens.tolist()}")
        windows = lens + 1
        cu_seqlens = torch.cat([windows.new_zeros(1), windows.cumsum(0)])
        rows = torch.arange(len(lens), device=lens.device)
        request = torch.repeat_interleave(rows, windows)
        offset = torch.arange(len(request), device=lens.device) - cu_seqlens[request]
        return cls(gamma, lens, cu_seqlens, request, offset)

    @property
    def num_requests(self) -> int:
        """R."""
        return self.verify_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """B = sum(1 + l_r), tokens in the pass."""
        return self.request.shape[0]

    def gather(self, padded: Tensor) -> Tensor:
        """[R, gamma + 1, ...] -> flat [B, ...]; entries beyond each window are dropped."""
        if padded.shape[:2] != (self.num_requests, self.gamma + 1):
            raise ValueError(
                f"expected [{self.num_requests}, {self.gamma + 1}, ...], got {tuple(padded.shape)}"
            )
        return padded[self.request, self.offset]

    def scatter(self, flat: Tensor, fill: float = 0) -> Tensor:
        """Flat [B, ...] -> [R, gamma + 1, ...]; entries beyond each window hold `fill`."""
        if flat.shape[0] != self.num_tokens:
            raise ValueError(f"expected [{self.num_tokens}, ...], got {tuple(flat.shape)}")
        padded = flat.new_full((self.num_requests, self.gamma + 1, *flat.shape[1:]), fill)
        padded[self.request, self.offset] = flat
        return padded
