"""Find out whether Triton's kernels run on a device."""

from __future__ import annotations

import torch
import triton


def runs_on(device: torch.device) -> bool:
    """Return whether Triton runs on a device: a GPU, or any in its interpreter."""
    return device.type == "cuda" or bool(triton.knobs.runtime.interpret)
