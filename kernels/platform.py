"""Where Triton's kernels run."""

from __future__ import annotations

import torch
import triton


def runs_on(device: torch.device) -> bool:
    """Whether Triton runs there: on a GPU, and anywhere in its interpreter."""
    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)
