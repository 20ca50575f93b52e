"""Replace SGLang's FlashMLA, attention over a latent cache, by a stub: its wheel is not sent.

An EAGLE worker imports it on every CUDA device to check whether its attention is of that kind. With
the Triton backend it is not, so these functions are not called.
"""

from __future__ import annotations

from typing import Any, NoReturn


def get_mla_metadata(*_arguments: Any, **_options: Any) -> NoReturn:
    """Raise RuntimeError."""
    raise RuntimeError("FlashMLA was not sent; use --attention-backend triton")


def flash_mla_with_kvcache(*_arguments: Any, **_options: Any) -> NoReturn:
    """Raise RuntimeError."""
    raise RuntimeError("FlashMLA was not sent; use --attention-backend triton")
