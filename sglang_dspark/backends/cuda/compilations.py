"""Count the Triton kernels that are compiled while serving: each stops all requests for seconds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import triton

logger = logging.getLogger(__name__)


def watch(counted: Callable[[], None]) -> None:
    """Call `counted` for each kernel that is compiled from now on, including SGLang's, and log it.

    Kernels in Triton's cache on disk are loaded, not compiled, and do not count. An installed
    listener is kept.
    """
    before = triton.knobs.compilation.listener

    def listener(**compiled: Any) -> None:
        if before is not None:
            before(**compiled)
        if not compiled["cache_hit"]:
            counted()
            logger.info(
                "sglang-dspark: Triton compiled %s in %.1f s while serving",
                compiled["src"].name,
                compiled["times"].total / 1e6,
            )

    triton.knobs.compilation.listener = listener
