"""Attention backend `dspark_cpu`: extend, decode, verify windows, draft blocks.

Implements sglang/srt/layers/attention/base_attn_backend.py. Float32 caches are attended by
the Numba kernel of `paged`, other types and capped scores by torch's scaled_dot_product_attention
(`dense`). The plan is made once a step, the layers only look it up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu import dense, paged, threads
from sglang_dspark.backends.cpu.fast_paths import fits, need, need_class
from sglang_dspark.backends.cpu.plan import AttentionPlan, plan_of_batch
from sglang_dspark.backends.cpu.threads import chosen_threads
from sglang_dspark.errors import DSparkError
from sglang_dspark.serving import upstream

WHAT_TO_DO = "serve another model, or set DSPARK_DISABLE=1 and choose --attention-backend"


class DsparkCpuAttnBackend(upstream.AttentionBackend):
    """One per model runner; the plan belongs to the pass in progress.

    Raises `DSparkError` for a model whose attention or cache it does not serve.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any):
        super().__init__()
        self.device = runner.device
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        _require_served(runner)
        pool = self.token_to_kv_pool
        # The kernel may write K and V itself only where the pool adds nothing to a plain row.
        self.writes_in_place = fits(
            "keys and values written where they are attended to", lambda: _require_plain_pool(pool)
        )
        self.sharing = threads.sharing(chosen_threads())
        paged.compiled()
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
        """q [T, H * D], k [T, Hkv, D], v [T, Hkv, Dv] -> [T, H * Dv], 0 for padding tokens.

        Raises `DSparkError` for a layer that wants more than softmax attention.
        """
        _require_plain(layer, kwargs)
        pool = self.token_to_kv_pool
        keys = pool.get_key_buffer(layer.layer_id)  # [S, Hkv, D]
        values = pool.get_value_buffer(layer.layer_id)  # [S, Hkv, Dv]
        in_place = not layer.logit_cap
        in_place = in_place and q.dtype == keys.dtype == values.dtype == torch.float32
        new = None
        if save_kv_cache and k is not None and v is not None:
            if in_place and self.writes_in_place:
                new = (k, v, forward_batch.out_cache_loc)
            else:
                pool.set_kv_buffer(
                    layer, upstream.KVWriteLoc(forward_batch.out_cache_loc, None), k, v
                )
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)  # [T, H, D]
        out = q.new_empty(queries.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        self._attend(queries, keys, values, layer, in_place, new, out)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    forward_decode = forward_extend

    def _attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        layer: Any,
        in_place: bool,
        new: tuple[Tensor, Tensor, Tensor] | None,
        out: Tensor,
    ) -> None:
        """Fill `out`: in place, which also writes `new`, or by torch."""
        plan = self.plan
        assert plan is not None, "a pass attends once its metadata are there"
        causal = layer.attn_type != upstream.AttentionType.ENCODER_ONLY
        window = layer.sliding_window_size
        window = paged.NO_WINDOW if window is None or window < 0 else int(window)
        if in_place:
            paged.paged_attention(
                queries, keys, values, plan, scale=layer.scaling, causal=causal, window=window,
                sharing=self.sharing, out=out, new=new,
            )  # fmt: skip
        else:
            dense.attend(queries, keys, values, plan, layer, causal, window, out)
        out[plan.num_queries :] = 0


def _require_served(runner: Any) -> None:
    """Raise `DSparkError` for caches that hold something else than K and V by `req_to_token`."""
    if runner.use_mla_backend:
        raise DSparkError(f"attention on CPU: latent attention (MLA) is not served; {WHAT_TO_DO}")
    if isinstance(runner.token_to_kv_pool, upstream.SWAKVPool):
        raise DSparkError(
            "attention on CPU: a cache of its own for sliding-window layers is not served; add "
            "--disable-hybrid-swa-memory"
        )


def _require_plain_pool(pool: Any) -> None:
    """Raise UnfitError for a pool that does more than to copy a row of float32."""
    need_class("the cache", pool, upstream.MHATokenToKVPool)
    need(pool.store_dtype == torch.float32, f"the cache is {pool.store_dtype}")
    need(pool.kv_cache_layout == "nhd", f"the cache is laid out as {pool.kv_cache_layout}")


def _require_plain(layer: Any, extra: dict[str, Any]) -> None:
    """Raise `DSparkError` for cross attention, sinks and the like."""
    wanted = sorted(name for name, value in extra.items() if value is not None)
    if layer.is_cross_attention:
        wanted.append("cross attention")
    if wanted:
        raise DSparkError(
            f"attention on CPU: layer {layer.layer_id} wants {', '.join(wanted)}, which is not "
            f"served; {WHAT_TO_DO}"
        )
