"""A draft block's window over its context (backends/moe/block_window.py) as an attention plan.

The plan's table begins where the window does, so the ordinary kernels read fewer slots and know
nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend
from sglang_dspark.backends.cpu.plan import CACHED, QUERIES, ROW, AttentionPlan
from sglang_dspark.serving import upstream


@contextmanager
def within_window(window: int) -> Iterator[None]:
    """Within, attention of this pass, by our backend, sees `window` tokens before each request's
    own."""
    backend = upstream.get_attn_backend()
    assert isinstance(backend, DsparkCpuAttnBackend)  # as block_window.by_plan has seen
    kept = backend.plan
    backend.plan = None if kept is None else narrowed(kept, window)
    try:
        yield
    finally:
        backend.plan = kept


def narrowed(plan: AttentionPlan, window: int) -> AttentionPlan:
    """The plan without what lies more than `window` tokens before a request's query tokens.

    The same plan where nothing does.
    """
    requests = plan.requests
    left_out = np.maximum(requests[:, CACHED] - requests[:, QUERIES] - window, 0)
    if not left_out.any():
        return plan
    seen = requests[:, CACHED] - left_out
    columns = left_out[:, None] + np.arange(int(seen.max()))
    columns = np.minimum(columns, plan.table.shape[1] - 1)  # behind `seen`: not read
    table = plan.table[requests[:, ROW, None], columns]
    moved = requests.copy()
    moved[:, ROW], moved[:, CACHED] = np.arange(len(requests)), seen
    return replace(plan, table=table, requests=moved, _masks={})
