"""A drafter with experts without what serves it on a CPU: its window, streams and products take the
path of a GPU. TRITON_INTERPRET=1 lets our grouped kernels stand among the products' backends, as on
an H100; without it torch alone is left, which no graph may hold.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from sglang_dspark.drafter.config import MOE_ARCHITECTURE
from sglang_dspark.patches.seam import Seam


def as_on_a_gpu(registry: Any, architecture: str) -> None:
    """BEFORE hook of `is_arch_supported`: of its model class, a moment before it is made."""
    if architecture != MOE_ARCHITECTURE:
        return
    from sglang_dspark.backends.cpu import expert_ops
    from sglang_dspark.backends.moe import block_window, expert_backends
    from sglang_dspark.experts.backends import BACKENDS, ExpertWorkload

    assert expert_backends, "it registers the CPU's backend, which is to go"
    block_window.by_plan = lambda batch: False
    expert_ops.supports_rows = lambda x: False
    BACKENDS.pop("compiled", None)
    triton = BACKENDS["triton"]

    def refusal(workload: ExpertWorkload) -> str | None:
        return triton.refusal(replace(workload, device="cuda", capability=(9, 0)))

    if os.environ.get("TRITON_INTERPRET") == "1":
        BACKENDS["triton"] = replace(triton, refusal=refusal)


SEAM = Seam(
    name="rehearsal-experts",
    target="sglang.srt.models.registry._ModelRegistry.is_arch_supported",
    kind="before",
    hook=as_on_a_gpu,
    signature="(self, architecture)",
    why="a CPU has compiled experts and streams, and narrows its own attention plan",
)
