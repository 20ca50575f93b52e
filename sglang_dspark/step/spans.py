"""Stages of a step by name in a profiler's trace, which SGLang's /start_profile writes.

`dspark:step` is the launch of a decode step, with its stages within; `dspark:plan` and
`dspark:learn` stand outside of it, and so does what a plan costs while another step computes.
Where no profiler runs, a span is one question whether one does.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

PREFIX = "dspark:"
_NOTHING: AbstractContextManager[Any] = nullcontext()


def span(stage: str) -> AbstractContextManager[Any]:
    """What runs within is `dspark:STAGE` in the trace."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return torch.profiler.record_function(f"{PREFIX}{stage}")
    return _NOTHING
