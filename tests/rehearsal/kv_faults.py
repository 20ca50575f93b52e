"""Faults of windows, KV slots, KV rows and tiers, planted in the target's verify passes.

DSPARK_REHEARSAL_FAULT names a file; the fault that it names is planted in every verify pass from
then on, an empty or missing file plants none. So one server shows them all.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

WINDOW, SLOT, ROW, TIER = FAULTS = (
    "window one short",
    "slot off by one",
    "row not committed",
    "tier too small",
)
POISON = "rejected rows are NaN"  # no fault: nothing reads them


@dataclass
class Planted:
    """The fault of the verify pass in progress, and the tokens of the tier below its own.

    plan: of the target's attention in this pass; layers look it up.
    """

    fault: str = ""
    tokens_below: int = 0
    plan: Any = None


def install() -> None:
    """Plant what the file names when a verify pass begins."""
    from sglang_dspark.backends.cpu import attention, attention_plan, paged_attention
    from sglang_dspark.backends.cuda.device import GraphDevice
    from sglang_dspark.step import verify

    now = Planted()
    attention_plan.plan_of_batch = attention.plan_of_batch = _plans(
        now, attention_plan.plan_of_batch
    )
    paged_attention.paged_attention = _attends(now, paged_attention.paged_attention)
    verify.verify = _verifies(now, verify.verify)
    GraphDevice.commit = _commits(now, GraphDevice.commit)  # type: ignore[method-assign]


def _verifies(now: Planted, verify: Callable[..., Any]) -> Callable[..., Any]:
    path = Path(os.environ["DSPARK_REHEARSAL_FAULT"])

    def verifies(device: Any, asked: Any, grammar: Any) -> Any:
        now.fault = path.read_text() if path.is_file() else ""
        tokens = asked.layout.graph_num_tokens
        smaller = [tier for tier in device.tiers if tier < tokens]
        now.tokens_below = max(smaller, default=tokens // 2)
        try:
            return verify(device, asked, grammar)
        finally:
            now.plan = None

    return verifies


def _plans(now: Planted, plan_of_batch: Callable[..., Any]) -> Callable[..., Any]:
    """WINDOW: each window's bound is one row too low; empty slots of a graph stay as they are."""
    from sglang_dspark.backends.cpu.attention_plan import CACHED, QUERIES

    def plans(batch: Any, table: Any) -> Any:
        made = plan_of_batch(batch, table)
        if getattr(batch.spec_info, "ragged_verify_layout", None) is None:
            return made  # not the target's pass
        if now.fault == WINDOW:
            requests = made.requests.copy()
            requests[:, CACHED] -= requests[:, CACHED] > requests[:, QUERIES]
            made = replace(made, requests=requests)
        now.plan = made
        return made

    return plans


def _attends(now: Planted, attention: Callable[..., None]) -> Callable[..., None]:
    """SLOT: a row is written into the next slot. TIER: rows beyond the tier below are neither
    written nor attended."""

    def attends(q: Any, k_cache: Any, v_cache: Any, plan: Any, **options: Any) -> None:
        verifying = now.plan is not None and plan is now.plan
        if verifying and now.fault in (SLOT, TIER):
            keys, values, slots = options["new"]
            if now.fault == SLOT:
                slots = (slots + 1) % len(k_cache)
            else:  # slot 0 is that of padding
                slots = slots.where(torch.arange(len(slots)) < now.tokens_below, 0)
            options["new"] = keys, values, slots
        attention(q, k_cache, v_cache, plan, **options)
        if verifying and now.fault == TIER:
            options["out"][now.tokens_below :] = 0

    return attends


def _commits(now: Planted, commit: Callable[..., None]) -> Callable[..., None]:
    """ROW: the target's KV row of the last accepted draft is zero, where a request has one.
    POISON: the draft's KV rows of windows behind the emitted tokens are NaN."""

    def commits(device: Any, asked: Any, verified: Any, accepted: Any) -> None:
        commit(device, asked, verified, accepted)
        if now.fault == POISON:
            slots = asked.window.verify_cache_loc_2d
            rejected = torch.arange(slots.shape[1]) >= accepted.commit_lens[:, None]
            pool = device._worker.draft_model_runner.token_to_kv_pool
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer[slots[rejected].long()] = torch.nan
        if now.fault != ROW:
            return
        pool = device._worker.model_runner.token_to_kv_pool
        emitted = accepted.commit_lens.long()  # [R], the anchor included
        last = asked.window.verify_cache_loc_2d[torch.arange(len(emitted)), emitted - 1]
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer[last[emitted > 1].long()] = 0

    return commits
