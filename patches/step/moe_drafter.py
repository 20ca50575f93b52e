"""Register drafters with experts as a model of SGLang.

Upstream: sglang/srt/models/registry.py, `_ModelRegistry`, a dict of classes that is asked for an
architecture before it returns the class. SGLANG_EXTERNAL_MODEL_PACKAGE fills the same dict, but
there is one such package, and it may be the user's.
"""

from __future__ import annotations

from typing import Any

from sglang_dspark.drafter.config import MOE_ARCHITECTURE
from sglang_dspark.patches.seam import Seam


def add_moe_drafter(registry: Any, architecture: str) -> None:
    """BEFORE hook of `is_arch_supported`: import our class when SGLang asks for it."""
    if architecture == MOE_ARCHITECTURE and architecture not in registry.models:
        from sglang_dspark.backends.moe.moe_model import DSparkMoEModel

        registry.models[architecture] = DSparkMoEModel


SEAMS = (
    Seam(
        name="moe-drafter",
        target="sglang.srt.models.registry._ModelRegistry.is_arch_supported",
        kind="before",
        hook=add_moe_drafter,
        signature="(self, architecture)",
        why="SGLang has drafters with experts inside DeepSeek-V4 alone",
    ),
)
