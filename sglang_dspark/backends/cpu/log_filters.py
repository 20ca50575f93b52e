"""Suppress two misleading SGLang warnings in a CPU server's log; `--log-level debug` shows both.

Upstream: sglang/srt/models/registry.py, `import_model_classes`, and
sglang/srt/speculative/dspark_components/dspark_planner.py, `DSparkVerifyPlanner`.
"""

from __future__ import annotations

import logging
import re

MODELS = "sglang.srt.models.registry"
PLANNER = "sglang.srt.speculative.dspark_components.dspark_planner"
_MISLEADING = {
    # Every process imports all model classes. Some require a GPU or an AMX build. A class that
    # fails to import for another reason may be the served one: that line stays.
    MODELS: re.compile(
        r"Ignore import error when loading sglang\.srt\.models\.\w+: "
        r"(No module named '(cutlass|torchaudio)'"
        r"|'_OpNamespace' 'sgl_kernel' object has no attribute '\w+_cpu'"
        r"|cannot import name 'causal_conv1d_fn' from 'sglang\.srt\.layers\.attention\.mamba\.)"
    ),
    # About upstream's own table of steps per second. A server that would use it stops (mode.py).
    PLANNER: re.compile(r"DSpark SPS table is uninitialized \(flat\)"),
}


def install() -> None:
    """Install the filter of each logger in this process; idempotent."""
    for name in _MISLEADING:
        logging.getLogger(name).addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    debugging = logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
    return debugging or not _MISLEADING[record.name].match(record.getMessage())
