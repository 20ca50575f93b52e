"""Hidden states of emitted tokens into the draft's context, packed before they are projected.

Upstream (0.5.23): `TargetHiddenKvInjector.inject_ragged` in sglang/srt/speculative/
dspark_components/dspark_kv_inject.py, which projects whole windows and leaves rejected rows out
when it writes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dspark.kernels.commit_rows import pack_torch, pack_triton
from sglang_dspark.kernels.platform import runs_on


def packs(worker: Any, requests: int, rows: int) -> bool:
    """Whether a pass of `rows` has fewer than whole windows, in a cache of plain keys and values.

    The cache of a latent attention has a writer of its own, and windows of its own shape.
    """
    pool = worker.draft_model_runner.token_to_kv_pool
    latent = hasattr(pool, "set_swa_key_buffer_radix_fused_norm_rope")
    return not latent and rows < requests * int(worker.verify_num_draft_tokens)


def commit_packed(
    worker: Any, batch: Any, window: Any, hidden: Tensor, emitted: Tensor, rows: int
) -> None:
    """Write keys and values of the first emitted[r] rows of each window.

    window: upstream's `VerifyWindow`. hidden: [R (gamma + 1), F] of the target's pass. emitted: [R]
    int32 on the device. rows: of the pass, no fewer than are emitted.
    """
    injector = worker._kv_injector
    slots = injector.ids_for(window.kv_loc_plan).long().view(len(emitted), -1)
    pack = pack_triton if runs_on(hidden.device) else pack_torch
    packed = pack(hidden, emitted, batch.seq_lens, slots.contiguous(), rows)
    with torch.inference_mode():
        injector.inject_target_hidden(
            target_hidden=packed.hidden,
            cache_loc=packed.slots,
            cache_loc_2d=None,
            positions=packed.positions,
            commit_lens=None,
        )
