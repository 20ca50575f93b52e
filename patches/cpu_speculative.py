"""Lets speculative algorithms start on CPU.

Upstream: sglang/srt/arg_groups/speculative_hook.py (0.5.23). `_handle_dspark` refuses devices by
name before it resolves its arguments; EAGLE's path switches overlap scheduling off on CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.patches.seam import Seam

# The device whose branch of upstream's argument handling fits: no CUDA graphs, no CUDA kernels.
_READS_AS = "xpu"


class _OnAllowedDevice:
    """A view of the server arguments whose device passes upstream's list."""

    def __init__(self, view: Any):
        self._view = view

    @property
    def device(self) -> str:
        return _READS_AS

    def __getattr__(self, name: str) -> Any:
        return getattr(self._view, name)


def handle_dspark(original: Callable[[Any], None], server_args: Any) -> None:
    """AROUND hook of `_handle_dspark`: on CPU, it sees a device that it accepts."""
    from sglang.srt.arg_groups import speculative_hook

    real = speculative_hook.resolving_view
    if real(server_args).device != "cpu":
        original(server_args)
        return
    speculative_hook.resolving_view = lambda args: _OnAllowedDevice(real(args))
    try:
        original(server_args)
    finally:
        speculative_hook.resolving_view = real


def keep_overlap(server_args: Any) -> None:
    """REPLACE hook of `_disable_overlap_schedule_for_cpu`: our backend is safe under overlap."""


SEAMS = (
    Seam(
        name="cpu-dspark-arguments",
        target="sglang.srt.arg_groups.speculative_hook._handle_dspark",
        kind="around",
        hook=handle_dspark,
        signature="(server_args)",
        why="upstream's DSPARK refuses every device but CUDA, NPU and XPU",
        device="cpu",
    ),
    Seam(
        name="cpu-keep-overlap",
        target="sglang.srt.arg_groups.speculative_hook._disable_overlap_schedule_for_cpu",
        kind="replace",
        hook=keep_overlap,
        signature="(server_args)",
        why="upstream runs EAGLE on CPU without overlap scheduling, which costs a step's CPU time",
        device="cpu",
    ),
)
