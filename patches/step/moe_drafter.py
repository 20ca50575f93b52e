"""Drafters with experts among the models that SGLang can load, in graphs where they may be.

Upstream: sglang/srt/models/registry.py, `_ModelRegistry`, a dict of classes that is asked
for an architecture before the class is taken. SGLANG_EXTERNAL_MODEL_PACKAGE fills the same dict,
but there is one such package, and it may be the user's. And sglang/srt/managers/tp_worker.py, which
captures what a worker's model computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.drafter.config import MOE_ARCHITECTURE
from sglang_dspark.patches.seam import Seam


def add_moe_drafter(registry: Any, architecture: str) -> None:
    """BEFORE hook of `is_arch_supported`: our class is imported when it is asked for."""
    if architecture == MOE_ARCHITECTURE and architecture not in registry.models:
        from sglang_dspark.backends.moe.moe_model import DSparkMoEModel

        registry.models[architecture] = DSparkMoEModel


def capture_if_it_may_be(
    original: Callable[..., None], worker: Any, capture_decode_cuda_graph: bool = True
) -> None:
    """AROUND hook of `init_cuda_graphs`: a draft that no graph may hold is not captured."""
    if worker.is_draft_worker:
        capture_decode_cuda_graph &= getattr(worker.model_runner.model, "capturable", True)
    original(worker, capture_decode_cuda_graph=capture_decode_cuda_graph)


SEAMS = (
    Seam(
        name="moe-drafter",
        target="sglang.srt.models.registry._ModelRegistry.is_arch_supported",
        kind="before",
        hook=add_moe_drafter,
        signature="(self, architecture)",
        why="SGLang has drafters with experts inside DeepSeek-V4 alone",
    ),
    Seam(
        name="moe-draft-graph",
        target="sglang.srt.managers.tp_worker.TpModelWorker.init_cuda_graphs",
        kind="around",
        hook=capture_if_it_may_be,
        signature="(self, capture_decode_cuda_graph=True)",
        why="a capture of grouped products that read the host would end the server",
    ),
)
