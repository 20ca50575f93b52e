"""Attention backend `dspark_cpu`: extend, decode, verify windows, draft blocks.

Implements sglang/srt/layers/attention/base_attn_backend.py (0.5.23). Short windows on float32
caches go through the Numba kernel of `paged`; long prefills and other cache types through torch's
scaled_dot_product_attention (`dense`). The plan is made once a step, the layers only look it up.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from sglang_dspark.serving.cpu import dense
from sglang_dspark.serving.cpu.paged import NO_WINDOW, paged_attention
from sglang_dspark.serving.cpu.plan import AttentionPlan, plan_of_batch
from sglang_dspark.serving.cpu.threads import chosen_threads

# Longest window the in-place kernel takes; beyond it the matrix products of torch win.
LONGEST_WINDOW = 32


class DsparkCpuAttnBackend(AttentionBackend):
    """One per model runner; `plan` belongs to the pass in progress."""

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any):
        super().__init__()
        self.device = runner.device
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.threads = chosen_threads()
        self.plan: AttentionPlan | None = None

    def support_triton(self) -> bool:
        return False

    def init_forward_metadata(self, forward_batch: Any) -> None:
        self.plan = plan_of_batch(forward_batch, self.req_to_token_pool.req_to_token)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """q [T, H * D], k and v [T, Hkv, D] -> [T, H * Dv]."""
        if save_kv_cache and k is not None and v is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v
            )
        return self._attend(q, layer)

    forward_decode = forward_extend

    def _attend(self, q: Tensor, layer: Any) -> Tensor:
        plan = self.plan
        if plan is None:
            raise RuntimeError("init_forward_metadata must run before the layers of a pass")
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)  # [S, Hkv, D]
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)  # [S, Hkv, Dv]
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)  # [T, H, D]
        causal = not layer.is_cross_attention and layer.attn_type != AttentionType.ENCODER_ONLY
        window = layer.sliding_window_size
        window = NO_WINDOW if window is None or window < 0 else int(window)
        all_float = q.dtype == keys.dtype == values.dtype == torch.float32
        if plan.longest_query > LONGEST_WINDOW or not all_float or layer.logit_cap:
            out = dense.attend(queries, keys, values, plan, layer, causal, window)
        else:
            out = q.new_empty(queries.shape[0], layer.tp_q_head_num, layer.v_head_dim)
            paged_attention(
                queries.numpy(),
                keys.numpy(),
                values.numpy(),
                plan,
                scale=layer.scaling,
                causal=causal,
                window=window,
                threads=self.threads,
                out=out.numpy(),
            )
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)
