"""Update weights of a running DSPARK server: the target's, or the drafter's if it is named.

Upstream (sglang/srt/managers/scheduler_components/weight_updater.py) loads an update's
weights into every runner, the draft's too. MTP layers are in the target's checkpoint; a DSpark
drafter has another one, whose layers have the names of the target's: they are overwritten, or
loading fails and ends the scheduler.

An update that names the drafter writes its parameters in place. `DSparkDraftMixin` in
sglang/srt/models/dspark.py keeps stacked copies of some, which it never renews.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

Runners = list[tuple[str, Any]]
# Called with a model before its weights change and after, and with the drafter after the target's.
FORGET: list[Callable[[Any], None]] = []
_begun = 0  # updates, of this process


def begin_update(runners: Runners) -> None:
    """Count an update of these runners' models, and forget what was made of their weights."""
    global _begun
    _begun += 1
    for _, runner in runners:
        _forget(runner.model)


def _forget(model: Any) -> None:
    for forget in FORGET:
        forget(model)


def updates() -> int:
    """Return the number of weight updates that this process has begun, failed ones included."""
    return _begun


@torch.inference_mode()
def renew_copies(model: Any) -> None:
    """Renew the heads, and copy weights into SGLang's stacked copies in place: graphs read them."""
    renew_heads(model)
    if not hasattr(model, "layers"):  # a chain drafter (backends/cpu/chain_draft.py) has no copies
        return
    attention = [layer.self_attn for layer in model.layers]
    fused = getattr(model, "_fused_kv_write_cache", None)  # a pool's id and its bundle
    if fused is not None and fused[1] is not None:
        # A class that projects in another way, as MiniMax's does, has no such copy.
        weight = inspect.getclosurevars(fused[1].project).nonlocals.get("w_all")
        if weight is not None:
            weight.copy_(_stacked(attention, "weight"))
            fused[1].k_norm_weights.copy_(torch.stack([a.k_norm.weight for a in attention]))
    stacked = getattr(model, "_stacked_ctx_kv_cache", None)
    if stacked:
        stacked["weight"].copy_(_stacked(attention, "weight"))
        stacked["k_norm_weight"].copy_(torch.stack([a.k_norm.weight for a in attention]))
        if stacked["bias"] is not None:
            stacked["bias"].copy_(_stacked(attention, "bias"))


@torch.inference_mode()
def renew_heads(model: Any) -> None:
    """Renew the copied rows of a reduced draft vocabulary, some of which are the target's.

    Rows that are made again at the next draft are forgotten.
    """
    _forget(model)
    reduced = getattr(getattr(model, "markov_head", None), "dspark_reduced", None)
    if reduced is not None:
        reduced.renew()
    if hasattr(model, "attach_again"):  # a chain drafter
        model.attach_again()


def renew_heads_of(worker: Any) -> None:
    """Renew the heads of a worker's draft model, if it is a DSPARK worker with one."""
    from sglang_dspark.serving import upstream

    if isinstance(worker, upstream.DSparkWorkerV2) and worker._hosts_draft:
        renew_heads(worker.draft_model)


def _stacked(attention: list[Any], name: str) -> torch.Tensor:
    """Stack the rows of all layers' keys and values, [L * 2 * H * D, ...]."""
    return torch.cat(
        [getattr(a.qkv_proj, name)[a.q_size : a.q_size + 2 * a.kv_size] for a in attention]
    )
