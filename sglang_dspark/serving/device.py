"""Which device this process serves on, as SGLang resolved it."""

from __future__ import annotations

from sglang_dspark.serving import upstream


def cpu_platform_active() -> bool:
    """Whether SGLang resolved to our CPU platform in this process."""
    return type(upstream.current_platform).__module__.startswith("sglang_dspark.")


def active_device() -> str:
    """What our seams are chosen by: `cpu`, `cuda`, or `none` where another platform serves."""
    import torch

    if cpu_platform_active():
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "none"
