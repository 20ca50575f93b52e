"""Report for `dspark doctor` which kernels run on this machine."""

from __future__ import annotations

from sglang_dspark.serving.diagnosis import Diagnosis


def look_at_kernels(found: Diagnosis) -> None:
    """Add the backends of experts and the matrix kernel to `found`, after its device is known."""
    from sglang_dspark.backends.cpu import linear  # imports torch, which may be broken here
    from sglang_dspark.backends.moe.expert_report import experts_here

    found.device["experts"], broken = experts_here()
    found.problems += broken
    if found.device["cpu_platform_active"]:
        off = linear.why_not()
        found.device["matrix_kernel"] = "on" if off is None else f"off: {off}"
        if off is not None:
            found.notes.append(f"our matrix kernel is off: {off}; serving will be slow")
