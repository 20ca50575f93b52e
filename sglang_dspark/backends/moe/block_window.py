"""Limit a draft block's attention to a window of its context, on any serving device.

Every row of a block sees the same last tokens before the anchor, and the block itself; where the
window is causal, only the block's rows up to its own. SGLang's
sliding windows (sglang/srt/layers/radix_attention.py) move with each query instead. Our CPU
backend's plan is narrowed (cpu/attention_plan.py). With any other backend the layer itself attends,
densely over window + gamma slots: shapes depend only on the number of requests and the host reads
no value, so a graph may capture it. It writes no K/V: the context of a drafted token is the
target's features, which are written when it is committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sglang_dspark.errors import DSparkError
from sglang_dspark.serving import upstream


@dataclass(frozen=True)
class Context:
    """Cache slots [R, window] int64 of the tokens before each request's anchor, in order; seen
    [R, window] bool: whether there is such a token."""

    slots: Tensor
    seen: Tensor


class BlockWindow:
    """The window that the layers of a draft pass see. tokens: of the context; None: all."""

    def __init__(self, tokens: int | None):
        self.tokens = tokens
        self.context: Context | None = None

    @contextmanager
    def over(self, batch: Any) -> Iterator[None]:
        """Limit the layers' attention to `tokens` of the context of this draft batch.

        Raises DSparkError for a K/V cache whose rows are not those of tokens.
        """
        if self.tokens is None:
            yield
        elif by_plan(batch):
            from sglang_dspark.backends.cpu.attention import within_window

            with within_window(self.tokens):
                yield
        else:
            _require_rows(upstream.get_token_to_kv_pool())
            table = upstream.get_req_to_token_pool().req_to_token
            self.context = context_of(table, batch.req_pool_indices, batch.seq_lens, self.tokens)
            try:
                yield
            finally:
                self.context = None


def by_plan(batch: Any) -> bool:
    """Return whether our CPU backend attends; it reads a plan of the pass."""
    if not batch.seq_lens.is_cpu:
        return False
    from sglang_dspark.backends.cpu.attention import DsparkCpuAttnBackend

    return isinstance(upstream.get_attn_backend(), DsparkCpuAttnBackend)


def _require_rows(pool: Any) -> None:
    layout = getattr(pool, "kv_cache_layout", "nhd")
    if layout != "nhd":
        raise DSparkError(
            f"the drafter has a window, which is read from a K/V cache of one row a token, not "
            f"from the layout {layout}; unset SGLANG_USE_HND_KVCACHE"
        )


def context_of(table: Tensor, rows: Tensor, lens: Tensor, window: int) -> Context:
    """Return the last `window` tokens before each anchor.

    table: slots by request row and position, `req_to_token`; rows [R]: the requests' rows; lens
    [R]: tokens before the anchor. The host reads nothing.
    """
    first = (lens - window).clamp(min=0)[:, None]  # [R, 1]
    position = first + torch.arange(window, device=lens.device)  # [R, window]
    seen = position < lens[:, None]
    slots = table[rows.long()[:, None], torch.where(seen, position, 0).long()]
    return Context(torch.where(seen, slots, 0).long(), seen)


class WindowedAttention(upstream.RadixAttention):
    """A draft layer's attention in a `BlockWindow`."""

    def __init__(self, whole: Any, window: BlockWindow, causal: bool = False):
        """Copy `whole`: attention over all of the context. causal: within the block."""
        super().__init__(
            num_heads=whole.tp_q_head_num,
            head_dim=whole.head_dim,
            scaling=whole.scaling,
            num_kv_heads=whole.tp_k_head_num,
            layer_id=whole.layer_id,
            attn_type=upstream.AttentionType.DECODER if causal else whole.attn_type,
        )
        self.window, self.causal = window, causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, forward_batch: Any, **extra: Any) -> Tensor:
        """Attend: q [R gamma, H * D], k and v [R gamma, Hkv * D] -> [R gamma, H * D]."""
        context = self.window.context
        if context is None:
            return super().forward(q, k, v, forward_batch, **extra)
        pool = upstream.get_token_to_kv_pool()
        return attend(
            q.view(-1, self.tp_q_head_num, self.head_dim),
            k.view(-1, self.tp_k_head_num, self.head_dim),
            v.view(-1, self.tp_v_head_num, self.v_head_dim),
            (pool.get_key_buffer(self.layer_id), pool.get_value_buffer(self.layer_id)),
            context,
            self.scaling,
            causal=self.causal,
        )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: tuple[Tensor, Tensor],
    context: Context,
    scale: float,
    *,
    causal: bool = False,
) -> Tensor:
    """Attend blocks q [R gamma, H, D], k, v [R gamma, Hkv, D] -> [R gamma, H * D].

    cache: keys and values [S, Hkv, D] by slot. Each row sees `context` and its whole block, or if
    `causal` the block's rows up to its own.
    """
    seen = context.seen  # [R, w]
    requests = len(seen)

    def both(cached: Tensor, own: Tensor) -> Tensor:
        """Gather [R, Hkv, w + gamma, D]; hidden positions are 0, not the cache's content."""
        kept = cached[context.slots].to(own.dtype).masked_fill(~seen[..., None, None], 0)
        return torch.cat([kept, own.unflatten(0, (requests, -1))], 1).transpose(1, 2)

    block = q.unflatten(0, (requests, -1)).transpose(1, 2)  # [R, H, gamma, D]
    rows = block.shape[2]
    own = seen.new_ones(rows, rows)
    own = (own.tril() if causal else own).expand(requests, -1, -1)
    context_seen = seen[:, None].expand(-1, rows, -1)
    out = scaled_dot_product_attention(
        block,
        both(cache[0], k),
        both(cache[1], v),
        attn_mask=torch.cat([context_seen, own], 2)[:, None],  # [R, 1, gamma, w + gamma]
        scale=scale,
        enable_gqa=True,
    )
    return out.transpose(1, 2).reshape(len(q), -1)
