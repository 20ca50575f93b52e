"""Define the Transformers config of a drafter with experts (drafter/config.py) for SGLang.

It is Qwen3's with more keys. `sliding_window` is renamed in it: SGLang would allocate a K/V
cache with windowed layers for that key, but the draft's keeps every token's keys.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, Qwen3Config

from sglang_dspark.drafter.config import MOE_MODEL_TYPE, DrafterConfig


class DSparkMoEConfig(Qwen3Config):
    """`config.json` of a `DSparkMoEModel`; context_window: its `sliding_window`, or None."""

    model_type = MOE_MODEL_TYPE

    def __init__(self, sliding_window: int | None = None, **fields: Any):
        window = fields.pop("context_window", sliding_window)
        super().__init__(**fields)
        self.context_window = window


def drafter_shape(config: Any) -> DrafterConfig:
    """Return the drafter of a `DSparkMoEConfig`. Raises DSparkError for a wrong field."""
    raw = config.to_dict()
    raw |= {"architectures": config.architectures, "sliding_window": config.context_window}
    return DrafterConfig.from_json(raw, config.name_or_path)


def register() -> None:
    """Register the config with Transformers in this process."""
    AutoConfig.register(MOE_MODEL_TYPE, DSparkMoEConfig, exist_ok=True)
