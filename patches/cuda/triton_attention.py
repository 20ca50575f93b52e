"""Support ragged verify windows on SGLang's Triton attention backend, with a kernel for windows.

Upstream (sglang/srt/layers/attention/triton_backend.py) assumes that every request's window has
gamma + 1 rows, and ignores the layout. Its kernels read where a window begins from `qo_indptr`, so
only that is set here, in the eager metadata and in a graph's buffers. Its unified kernel of
deterministic inference counts rows itself; backends/cuda/features.py excludes it.

Upstream calls `_forward_extend_kernel` for prefills, verify passes and blocks of the drafter alike.
Its kernel (sglang/kernels/ops/attention/extend_attention.py) is made for prefills: a program serves
one query head with tiles of 64 or 128 rows, of which a window fills at most gamma + 1. On an H200
it used 7.6 of the 16.5 ms of a step of 64 requests. The split-KV kernels of the same file are for
AMD only and refuse ragged windows.

Only passes of mode TARGET_VERIFY run on our kernel. SGLang's kernel runs, with one line in the log,
where `kernels/window_attention.py` lacks an option of the layer, and always with
`verify: {window_kernel: false}`.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from torch import Tensor

from sglang_dspark.kernels.window_attention import attend_triton
from sglang_dspark.kernels.window_inputs import Context, Rule, Windows, why_not
from sglang_dspark.patches.seam import Seams, Upstream
from sglang_dspark.serving.config import current_config

SEAMS = Seams(device="cuda")
logger = logging.getLogger(__name__)


@SEAMS.subclass(
    "cuda-triton-windows",
    "sglang.srt.layers.attention.triton_backend.TritonAttnBackend",
    why="the backend ignores the layout: a compact pass aborts at four users; and its kernel "
    "reads the keys of a window once a query head, in tiles for prefills",
)
class TritonAttention(Upstream):
    """Upstream's backend, with verify windows of different lengths."""

    supports_ragged_verify_graph = True  # the runner reads this before it replays a ragged pass

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Set the start of each request's rows to that of the pass's layout."""
        super().init_forward_metadata(forward_batch)
        layout = getattr(forward_batch.spec_info, "ragged_verify_layout", None)
        if layout is not None and forward_batch.forward_mode.is_target_verify():
            self.forward_metadata.qo_indptr = layout.qo_indptr_device

    def _update_target_verify_buffers(
        self, plan: Any, bs: int, seq_lens: Any, spec_info: Any, req_pool_indices: Any
    ) -> Any:
        """Stage the windows for a captured graph.

        bs: slots of the graph. Empty slots get the tier's tokens that are in no window, or the
        last window if no slot is empty, as in SGLang's FA3 backend: rows of no window would stay
        unwritten, and their content reaches MoE routing and per-tensor scales.
        Attention is causal, so the last window's own rows do not read them. A window longer than a
        tile of the kernel (64 rows or more) is written up to one tile. That needs tiers more than
        56 tokens apart: graphs of more than 64 requests.
        """
        found = super()._update_target_verify_buffers(
            plan, bs, seq_lens, spec_info, req_pool_indices
        )
        layout = getattr(spec_info, "ragged_verify_layout", None)
        if layout is not None:
            layout = layout.padded_to_bucket(padded_bs=bs)
            self.qo_indptr[: bs + 1].copy_(layout.qo_indptr_device)
        return found

    def _forward_extend_kernel(self, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a verify pass on our kernel if it supports the pass, else on SGLang's."""
        # The mode is not passed on; only TARGET_VERIFY has mask_indptr in upstream's metadata.
        is_verify = getattr(self.forward_metadata, "mask_indptr", None) is not None
        is_chosen = self.dllm_attention is None and current_config().verify.window_kernel
        if is_verify and is_chosen and _attend(*args, **kwargs):
            return None
        return super()._forward_extend_kernel(layer, *args, **kwargs)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, k_buffer: Tensor, v_buffer: Tensor,
    qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, custom_mask: Tensor | None,
    is_causal: bool, mask_indptr: Tensor, max_len_extend: int, k_scale: float, v_scale: float,
    sm_scale: float, *, logit_cap: float, sliding_window_size: int, sinks: Tensor | None,
    xai_temperature_len: int, score_mod: Any, **ignored: Any,
) -> bool:  # fmt: skip
    """Write `o` [T, H, Dv]; return False where SGLang's kernel must run.

    Arguments are those of upstream's `extend_attention_fwd`. ignored: page_size and
    extend_seq_lens_cpu (slots of a cache [slots, KV, D] have one stride), window_kv_offsets (of a
    mask), aux_tensors (of score_mod).
    """
    if custom_mask is not None:
        return False  # a tree of another algorithm's drafts
    windows = Windows(q, k, v, qo_indptr, max_len_extend)
    context = Context(k_buffer, v_buffer, kv_indptr, kv_indices, k_scale, v_scale)
    if xai_temperature_len > 0:
        why: str | None = "the layer scales its scores by position"
    elif score_mod is not None:
        why = "the layer adds a term of its own to its scores"
    else:
        why = why_not(windows, context)
    if why is not None:
        _report(why)
        return False
    # Upstream's kernel applies no window for -1, nor for 0.
    sliding = sliding_window_size if sliding_window_size > 0 else -1
    attend_triton(windows, context, Rule(sm_scale, is_causal, sliding, logit_cap, sinks), o)
    return True


@cache
def _report(why: str) -> None:
    """Log once that SGLang's kernel attends."""
    logger.info("sglang-dspark: verify windows are read by SGLang's extend kernel: %s", why)
