"""A small paged cache of SGLang's own classes, passes over it, and what they should return.

The cache holds NaN wherever no request has written, so reading one slot too many shows.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout
from torch import Tensor

SPARE_SLOTS = 9
SPARE_COLUMNS = 13


@dataclass(frozen=True)
class Case:
    """R requests: prefix[r] tokens in the cache, window[r] query tokens to come."""

    prefix: tuple[int, ...]
    window: tuple[int, ...]
    heads: int = 3
    kv_heads: int = 1
    dim: int = 16
    value_dim: int = 16
    sliding: int = -1
    bidirectional: bool = False
    shuffled: bool = True
    logit_cap: float = 0.0
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def lens(self) -> list[int]:
        """Tokens of each request, its window included."""
        return [p + w for p, w in zip(self.prefix, self.window, strict=True)]


class World:
    """Pools filled with the requests' prefixes, and the rows their windows will write."""

    def __init__(self, case: Case):
        torch.manual_seed(case.seed)
        self.case = case
        lens, requests = case.lens, len(case.prefix)
        size = sum(lens) + SPARE_SLOTS
        self.kv_pool = MHATokenToKVPool(
            size=size,
            page_size=1,
            dtype=case.dtype,
            head_num=case.kv_heads,
            head_dim=case.dim,
            v_head_dim=case.value_dim,
            layer_num=1,
            device="cpu",
            enable_memory_saver=False,
        )
        self.req_pool = ReqToTokenPool(requests + 2, max(lens) + SPARE_COLUMNS, "cpu", False)
        order = torch.randperm(size) if case.shuffled else torch.arange(size)
        self.slots = list((order + 1)[: sum(lens)].split(lens))  # R x [T_r]; slot 0 is padding
        self.rows = (torch.randperm(requests + 2) + 1)[:requests]  # [R]
        self.keys = [torch.randn(n, case.kv_heads, case.dim).to(case.dtype) for n in lens]
        self.values = [torch.randn(n, case.kv_heads, case.value_dim).to(case.dtype) for n in lens]
        self.queries = torch.randn(sum(case.window), case.heads * case.dim).to(case.dtype)
        self._fill()

    def _fill(self) -> None:
        key, value = self.kv_pool.k_buffer[0], self.kv_pool.v_buffer[0]
        key.fill_(float("nan"))
        value.fill_(float("nan"))
        for r, slots in enumerate(self.slots):
            self.req_pool.req_to_token[self.rows[r], : slots.numel()] = slots.to(torch.int32)
            old = slots[: self.case.prefix[r]]
            key[old] = self.keys[r][: old.numel()]
            value[old] = self.values[r][: old.numel()]

    def runner(self) -> SimpleNamespace:
        """Return the model-runner fields that an attention backend reads."""
        return SimpleNamespace(
            device="cpu",
            req_to_token_pool=self.req_pool,
            token_to_kv_pool=self.kv_pool,
            use_mla_backend=False,
        )

    def layer(self) -> RadixAttention:
        case = self.case
        return RadixAttention(
            num_heads=case.heads,
            head_dim=case.dim,
            v_head_dim=case.value_dim,
            scaling=case.dim**-0.5,
            num_kv_heads=case.kv_heads,
            layer_id=0,
            logit_cap=case.logit_cap,
            sliding_window_size=case.sliding,
            attn_type=(AttentionType.ENCODER_ONLY if case.bidirectional else AttentionType.DECODER),
        )

    def new_rows(self, per_request: list[Tensor]) -> Tensor:
        """The windows' rows of every request's tensor, concatenated."""
        pairs = zip(self.case.prefix, per_request, strict=True)
        return torch.cat([rows[prefix:] for prefix, rows in pairs])

    def forward(self, backend: Any, batch: ForwardBatch) -> Tensor:
        """One layer of one pass: [sum window, H * Dv]."""
        backend.init_forward_metadata(batch)
        k, v = self.new_rows(self.keys), self.new_rows(self.values)
        return backend.forward(self.queries, k, v, self.layer(), batch)

    def expected(self) -> Tensor:
        """[sum window, H * Dv] float64, one query row at a time."""
        case, out, row = self.case, [], 0
        group = case.heads // case.kv_heads
        for r, total in enumerate(case.lens):
            for position in range(case.prefix[r], total):
                q = self.queries[row].double().view(case.heads, case.dim)
                last = total if case.bidirectional else position + 1
                first = max(0, position - case.sliding) if case.sliding >= 0 else 0
                k = self.keys[r][first:last].double().repeat_interleave(group, 1)
                v = self.values[r][first:last].double().repeat_interleave(group, 1)
                scores = torch.einsum("hd,thd->ht", q, k) * case.dim**-0.5
                if case.logit_cap:
                    scores = case.logit_cap * torch.tanh(scores / case.logit_cap)
                out.append(torch.einsum("ht,thd->hd", scores.softmax(-1), v).reshape(-1))
                row += 1
        return torch.stack(out)


def _batch(world: World, mode: ForwardMode, seq_lens: list[int], **extra: Any) -> ForwardBatch:
    lens = torch.tensor(seq_lens, dtype=torch.int64)
    return ForwardBatch(
        forward_mode=mode,
        batch_size=len(seq_lens),
        input_ids=torch.zeros(sum(world.case.window), dtype=torch.int64),
        req_pool_indices=world.rows,
        seq_lens=lens,
        seq_lens_cpu=lens,
        seq_lens_sum=sum(seq_lens),
        out_cache_loc=world.new_rows(world.slots),
        **extra,
    )


def decode_pass(world: World) -> ForwardBatch:
    assert set(world.case.window) == {1}
    return _batch(world, ForwardMode.DECODE, world.case.lens)


def extend_pass(world: World, mode: ForwardMode = ForwardMode.EXTEND) -> ForwardBatch:
    window = torch.tensor(world.case.window, dtype=torch.int32)
    return _batch(
        world,
        mode,
        world.case.lens,
        extend_seq_lens=window,
        extend_prefix_lens=torch.tensor(world.case.prefix, dtype=torch.int32),
        extend_start_loc=(window.cumsum(0) - window).to(torch.int32),
        extend_seq_lens_cpu=list(world.case.window),
        extend_prefix_lens_cpu=list(world.case.prefix),
    )


def verify_pass(world: World, layout: RaggedVerifyLayout | None = None) -> ForwardBatch:
    """Target-verify, also the form of DSPARK's draft block; `seq_lens` leaves the window out."""
    case = world.case
    assert layout is not None or len(set(case.window)) == 1
    spec = DFlashVerifyInput(
        draft_token=torch.zeros(sum(case.window), dtype=torch.int64),
        positions=torch.zeros(sum(case.window), dtype=torch.int64),
        draft_token_num=max(case.window),
        capture_hidden_mode=CaptureHiddenMode.FULL,
        ragged_verify_layout=layout,
    )
    return _batch(world, ForwardMode.TARGET_VERIFY, list(case.prefix), spec_info=spec)


def ragged_pass(world: World) -> ForwardBatch:
    layout = RaggedVerifyLayout.from_verify_lens(
        verify_lens_cpu=world.case.window,
        device=torch.device("cpu"),
        grid=[sum(world.case.window)],
    )
    return verify_pass(world, layout)
