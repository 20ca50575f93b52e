"""A DSPARK worker for a `HostDevice`: the parts that its stages read, without models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def worker_for(gamma: int, **parts: Any) -> Any:
    """Upstream's worker of one rank; parts: further attributes."""
    tp_sync = SimpleNamespace(sync=lambda site, values: values, enabled=lambda site: False)
    usual = {
        "gamma": gamma,
        "verify_num_draft_tokens": gamma + 1,
        "device": "cpu",
        "draft_model": SimpleNamespace(confidence_head=object()),
        "draft_model_runner": None,
        "model_runner": None,
        "_proposer": SimpleNamespace(noise=None),
        "sample_from_anchor": True,
        "_greedy_draft": False,
        "_need_mamba_verify_commit": False,
        "_tp_sync": tp_sync,
    }
    return SimpleNamespace(**usual | parts)
