"""Declare an attention backend with ragged windows where the user names none.

Upstream: `get_default_attn_backend` in sglang/srt/arg_groups/model_override_base.py
returns fa3 on Hopper, and flashinfer for DSPARK on other GPUs. With flashinfer every draft is
verified. A backend named by the user, the target's architecture or deterministic inference stays.
`features.GPUS` is the table.

The drafter has the target's backend: `resolve_draft_worker_attention_backend` in
sglang/srt/speculative/draft_worker_common.py inherits the prefill backend, and triton, trtllm_mha
and fa4 are among its choices. Its block attends in both directions, for which trtllm_mha uses one
row a token (`_needs_encoder_only_expand` in trtllm_mha_backend.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from sglang_dspark.backends import drafter_check
from sglang_dspark.backends.cuda import features
from sglang_dspark.errors import DSparkError
from sglang_dspark.patches.seam import Seams
from sglang_dspark.serving import mode, upstream

SEAMS = Seams(device="cuda")
logger = logging.getLogger(__name__)


@SEAMS.around(
    "cuda-default-attention",
    "sglang.srt.arg_groups.model_override_base.get_default_attn_backend",
    why="upstream's default for DSPARK off Hopper is flashinfer, which has no ragged windows",
)
def choose_backend(
    original: Callable[[Any, bool, Any], str],
    server_args: Any,
    use_mla_backend: bool,
    model_config: Any,
) -> str:
    """Return SGLang's default, or a backend that adds ragged windows to it (AROUND hook)."""
    chosen = original(server_args, use_mla_backend, model_config)
    if use_mla_backend or model_config.is_encoder_decoder:
        return chosen
    is_view = isinstance(server_args, upstream.ResolvedView | upstream.ResolvingConfig)
    record = upstream.record_of(server_args) if is_view else server_args
    ours = _scheduled_backend(record, chosen, asymmetric=bool(model_config.has_asymmetric_kv))
    if ours is None:
        return chosen
    logger.info(
        "sglang-dspark: attention backend %s, not SGLang's default %s, which has no verify windows "
        "of different lengths; --attention-backend names another",
        ours,
        chosen,
    )
    return ours


def _scheduled_backend(record: Any, sglangs: str, *, asymmetric: bool) -> str | None:
    """Return this GPU's backend if the server is scheduled with it; None: keep SGLang's."""
    args = upstream.resolving_view(record)
    is_ours = str(args.speculative_algorithm).upper() == "DSPARK" and mode.choice().ours
    if not is_ours or not str(args.device).startswith("cuda"):
        return None
    capability = torch.cuda.get_device_capability()
    backend = features.default_backend(sglangs, args, capability, asymmetric=asymmetric)
    if backend is None:
        return None
    overlay = upstream._declaration_overlay(record) | {"attention_backend": backend}
    try:
        if drafter_check.drafter_folder(args) is None:
            return None
        why = drafter_check.obstacle(record, upstream.ResolvedView(record, overlay=overlay))
    except DSparkError:
        return None  # `check_drafter` stops the server with the same message
    return backend if why is None else None
