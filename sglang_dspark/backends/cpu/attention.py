"""Implement the attention backend `dspark_cpu`, for all passes and EAGLE's drafting steps.

Implements sglang/srt/layers/attention/base_attn_backend.py. paged_attention.py computes: float32
caches by csrc/attention.cpp, other types and capped scores by torch. The plan is made once a step;
the layers only read it.

EAGLE's drafting steps beyond the first adapt the multi-step draft backends of
sglang/srt/layers/attention: a container with one backend for each step. Request r has its drafts
in the slots from seq_len on of its row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.backends.cpu import paged_attention
from sglang_dspark.backends.cpu.attention_plan import (
    AttentionPlan,
    make_plan,
    narrowed,
    plan_of_batch,
)
from sglang_dspark.backends.cpu.fast_paths import (
    require,
    require_class,
    require_library,
    supported,
)
from sglang_dspark.backends.cpu.threads import chosen_threads, pool_threads
from sglang_dspark.errors import DSparkError
from sglang_dspark.serving import upstream

WHAT_TO_DO = "serve another model, or set DSPARK_DISABLE=1 and choose --attention-backend"


class DsparkCpuAttnBackend(upstream.AttentionBackend):
    """One backend per model runner; its plan is that of the pass in progress.

    Raises `DSparkError` for a model with unsupported attention or an unsupported cache.
    """

    needs_cpu_seq_lens = False

    def __init__(self, runner: Any):
        super().__init__()
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        _require_served(runner)
        pool = self.token_to_kv_pool
        self.in_place = supported("attention over float32 caches in place", require_library)
        # The kernel may write K and V itself only where the pool adds nothing to a plain row.
        self.writes_in_place = self.in_place and supported(
            "keys and values written where they are attended to", lambda: require_plain_pool(pool)
        )
        self.threads = pool_threads(chosen_threads())
        self.plan: AttentionPlan | None = None

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
        """Attend: q [T, H * D], k [T, Hkv, D], v [T, Hkv, Dv] -> [T, H * Dv], 0 for padding rows.

        Raises `DSparkError` for a layer that requires more than softmax attention.
        """
        _require_plain(layer, kwargs)
        pool = self.token_to_kv_pool
        keys = pool.get_key_buffer(layer.layer_id)  # [S, Hkv, D]
        values = pool.get_value_buffer(layer.layer_id)  # [S, Hkv, Dv]
        in_place = self.in_place and not layer.logit_cap
        in_place = in_place and q.dtype == keys.dtype == values.dtype == torch.float32
        writes = save_kv_cache and k is not None and v is not None
        kernel_writes = writes and in_place and self.writes_in_place
        new: Any = (k, v, forward_batch.out_cache_loc) if kernel_writes else None
        if writes and not kernel_writes:
            pool.set_kv_buffer(layer, upstream.KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)  # [T, H, D]
        out = q.new_empty(queries.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        plan = self.plan
        assert plan is not None, "a pass attends once its metadata are there"
        causal = layer.attn_type != upstream.AttentionType.ENCODER_ONLY
        window = paged_attention.sliding_window_of(layer)
        if in_place:
            paged_attention.paged_attention(
                queries, keys, values, plan, scale=layer.scaling, causal=causal, window=window,
                threads=self.threads, out=out, new=new,
            )  # fmt: skip
        else:
            paged_attention.attend_by_torch(queries, keys, values, plan, layer, causal, window, out)
        out[plan.num_queries :] = 0
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)

    forward_decode = forward_extend


def _require_served(runner: Any) -> None:
    """Raise `DSparkError` for caches other than K and V by `req_to_token`."""
    if runner.use_mla_backend:
        raise DSparkError(f"attention on CPU: latent attention (MLA) is not served; {WHAT_TO_DO}")
    if isinstance(runner.token_to_kv_pool, upstream.SWAKVPool):
        raise DSparkError(
            "attention on CPU: a cache of its own for sliding-window layers is not served; add "
            "--disable-hybrid-swa-memory"
        )


def require_plain_pool(pool: Any) -> None:
    """Raise UnsupportedError for a pool that does more than copy a float32 row."""
    require_class("its cache", pool, upstream.MHATokenToKVPool)
    require(pool.store_dtype == torch.float32, f"its cache is {pool.store_dtype}")
    require(pool.kv_cache_layout == "nhd", f"its cache is laid out as {pool.kv_cache_layout}")


def _require_plain(layer: Any, extra: dict[str, Any]) -> None:
    """Raise `DSparkError` for cross attention, sinks and similar options."""
    wanted = sorted(name for name, value in extra.items() if value is not None)
    if layer.is_cross_attention:
        wanted.append("cross attention")
    if wanted:
        raise DSparkError(
            f"attention on CPU: layer {layer.layer_id} wants {', '.join(wanted)}, which is not "
            f"served; {WHAT_TO_DO}"
        )


class DsparkCpuDraftStepBackend(DsparkCpuAttnBackend):
    """The backend of one drafting step; the container makes its plan."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Keep the plan of this step, which `DsparkCpuMultiStepDraftBackend` sets."""


class DsparkCpuMultiStepDraftBackend:
    """`attn_backends[s]` serves step s; the last of `speculative_num_steps` needs no pass."""

    def __init__(self, runner: Any, speculative_num_steps: int):
        self.attn_backends = [
            DsparkCpuDraftStepBackend(runner) for _ in range(speculative_num_steps - 1)
        ]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan every step; seq_lens [R] count the tokens before the first draft."""
        table = self.attn_backends[0].req_to_token_pool.req_to_token
        lens = forward_batch.seq_lens.to(torch.int64)
        for step, backend in enumerate(self.attn_backends):
            backend.plan = make_plan(
                table, forward_batch.req_pool_indices, torch.ones_like(lens), lens + step + 1
            )


@contextmanager
def within_window(window: int) -> Iterator[None]:
    """Limit the attention of this pass to `window` tokens before each request's own."""
    backend = upstream.get_attn_backend()
    assert isinstance(backend, DsparkCpuAttnBackend)  # checked by block_window.by_plan
    kept = backend.plan
    backend.plan = None if kept is None else narrowed(kept, window)
    try:
        yield
    finally:
        backend.plan = kept
