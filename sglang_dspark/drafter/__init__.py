"""Semi-autoregressive drafter (paper, 3.1): parallel backbone, sequential head, confidence."""

from sglang_dspark.drafter.checkpoint import load_drafter, save_drafter
from sglang_dspark.drafter.config import DrafterConfig
from sglang_dspark.drafter.model import DraftBlock, DSparkDrafter

__all__ = ["DSparkDrafter", "DraftBlock", "DrafterConfig", "load_drafter", "save_drafter"]
