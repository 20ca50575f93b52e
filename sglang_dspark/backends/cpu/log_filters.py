"""Suppress two misleading SGLang warnings in a CPU server's log.

Upstream: sglang/srt/models/registry.py, `import_model_classes`, and
sglang/srt/speculative/dspark_components/dspark_planner.py, `DSparkVerifyPlanner`. A filter on the
logger of each drops it by its text; `--log-level debug` shows both.
"""

from __future__ import annotations

import logging
import re

from sglang_dspark.serving import mode

MODELS = "sglang.srt.models.registry"
PLANNER = "sglang.srt.speculative.dspark_components.dspark_planner"

# Every process imports all model classes. Some require a GPU or an AMX build. A class that fails
# to import for another reason may be the served one: that line stays.
_NO_BUILD_HERE = re.compile(
    r"Ignore import error when loading sglang\.srt\.models\.\w+: "
    r"(No module named '(cutlass|torchaudio)'"
    r"|'_OpNamespace' 'sgl_kernel' object has no attribute '\w+_cpu'"
    r"|cannot import name 'causal_conv1d_fn' from 'sglang\.srt\.layers\.attention\.mamba\.mamba')"
)
# About upstream's own table of steps per second, which our scheduler does not use.
_UNUSED_TABLE = re.compile(r"DSpark SPS table is uninitialized \(flat\)")


def install() -> None:
    """Install the filters in this process; idempotent."""
    logging.getLogger(MODELS).addFilter(_no_missing_build)
    logging.getLogger(PLANNER).addFilter(_no_unused_table)


def _no_missing_build(record: logging.LogRecord) -> bool:
    return _debugging(record) or not _NO_BUILD_HERE.match(record.getMessage())


def _no_unused_table(record: logging.LogRecord) -> bool:
    ours = not _debugging(record) and mode.choice().ours
    return not (ours and _UNUSED_TABLE.match(record.getMessage()))


def _debugging(record: logging.LogRecord) -> bool:
    return logging.getLogger(record.name).isEnabledFor(logging.DEBUG)
