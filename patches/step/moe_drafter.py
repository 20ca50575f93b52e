"""Register drafters with experts as a model of SGLang, and capture graphs only where they can be.

Upstream: sglang/srt/models/registry.py, `_ModelRegistry`, a dict of classes that is asked for an
architecture before it returns the class. SGLANG_EXTERNAL_MODEL_PACKAGE fills the same dict, but
there is one such package, and it may be the user's. And sglang/srt/managers/tp_worker.py, which
captures the graphs of a worker's model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dspark.drafter.config import MOE_ARCHITECTURE
from sglang_dspark.patches.seam import Seam


def add_moe_drafter(registry: Any, architecture: str) -> None:
    """BEFORE hook of `is_arch_supported`: import our class when SGLang asks for it."""
    if architecture == MOE_ARCHITECTURE and architecture not in registry.models:
        from sglang_dspark.backends.moe.moe_model import DSparkMoEModel

        registry.models[architecture] = DSparkMoEModel


def capture_if_supported(
    original: Callable[..., None], worker: Any, capture_decode_cuda_graph: bool = True
) -> None:
    """AROUND hook of `init_cuda_graphs`: do not capture a draft that no graph supports."""
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
        hook=capture_if_supported,
        signature="(self, capture_decode_cuda_graph=True)",
        why="a capture of grouped products that read the host would end the server",
    ),
)
