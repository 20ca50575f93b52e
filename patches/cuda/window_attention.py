"""Attend from verify windows with our kernel in place of the Triton backend's extend kernel.

Upstream: `TritonAttnBackend.forward_extend` in sglang/srt/layers/attention/triton_backend.py calls
`_forward_extend_kernel` for prefills, verify passes and blocks of the drafter alike. Its kernel
(sglang/kernels/ops/attention/extend_attention.py) is made for prefills: a program serves one query
head with tiles of 64 or 128 rows, of which a window has at most gamma + 1. On an H200 it took 7.6
of the 16.5 ms of a step of 64 requests. The split-KV kernels of the same file serve AMD alone and
refuse ragged windows.

Only passes of mode TARGET_VERIFY are changed. What `kernels/window_attention.py` does not support
stays SGLang's, with one line in the log. `verify: {window_kernel: false}` leaves all of it there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import Tensor

from sglang_dspark.kernels.window_attention import attend_triton
from sglang_dspark.kernels.window_inputs import Context, Rule, Windows, why_not
from sglang_dspark.patches.seam import Seam
from sglang_dspark.serving.config import current_config

logger = logging.getLogger(__name__)


def attend_windows(
    original: Callable[..., Any], backend: Any, layer: Any, *rows: Any, **options: Any
) -> Any:
    """AROUND hook of `_forward_extend_kernel`: run a verify pass on our kernel."""
    # In upstream's metadata TARGET_VERIFY alone has mask_indptr; the mode itself is not passed on.
    is_verify = getattr(backend.forward_metadata, "mask_indptr", None) is not None
    is_chosen = backend.dllm_attention is None and current_config().verify.window_kernel
    if is_verify and is_chosen and _attend(*rows, **options):
        return None
    return original(backend, layer, *rows, **options)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, k_buffer: Tensor, v_buffer: Tensor,
    qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, custom_mask: Tensor | None,
    is_causal: bool, mask_indptr: Tensor, max_len_extend: int, k_scale: float, v_scale: float,
    sm_scale: float, *, logit_cap: float, sliding_window_size: int, sinks: Tensor | None,
    xai_temperature_len: int, score_mod: Any, **ignored: Any,
) -> bool:  # fmt: skip
    """Write `o` [T, H, Dv]; return False where SGLang's kernel has to.

    Arguments are those of upstream's `extend_attention_fwd`. ignored: page_size and
    extend_seq_lens_cpu (slots of a cache [slots, KV, D] have one stride), window_kv_offsets (of a
    mask), aux_tensors (of score_mod).
    """
    if custom_mask is not None:
        return False  # a tree of another algorithm's drafts
    windows = Windows(q, k, v, qo_indptr, max_len_extend)
    context = Context(k_buffer, v_buffer, kv_indptr, kv_indices, k_scale, v_scale)
    why = _unsupported(xai_temperature_len, score_mod) or why_not(windows, context)
    if why is not None:
        _report(why)
        return False
    # Upstream's kernel has no window for -1 and none for 0 either.
    sliding = sliding_window_size if sliding_window_size > 0 else -1
    attend_triton(windows, context, Rule(sm_scale, is_causal, sliding, logit_cap, sinks), o)
    return True


def _unsupported(xai_temperature_len: int, score_mod: Any) -> str | None:
    """Return the option of a layer that our kernel does not have."""
    if xai_temperature_len > 0:
        return "the layer scales its scores by position"
    return "the layer adds a term of its own to its scores" if score_mod is not None else None


@cache
def _report(why: str) -> None:
    """Log once that SGLang's kernel attends."""
    logger.info("sglang-dspark: verify windows are read by SGLang's extend kernel: %s", why)


SEAMS = (
    Seam(
        name="cuda-window-attention",
        target="sglang.srt.layers.attention.triton_backend.TritonAttnBackend."
        "_forward_extend_kernel",
        kind="around",
        hook=attend_windows,
        signature="(self, layer, *args, **kwargs)",
        why="upstream's kernel reads the keys of a window once a query head, in tiles for prefills",
        device="cuda",
    ),
)
