"""The KV pool's memory is allocated when it is written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_dspark.patches.cpu.kv_memory import create_buffers, mapped_zeros

SIZE, LAYERS = 100_000, 4


def pool_of(dtype: torch.dtype) -> Any:
    """A pool of 4 layers of 100,000 slots by upstream's own code, 2 heads of 32."""
    pool = MHATokenToKVPool.__new__(MHATokenToKVPool)
    saver = SimpleNamespace(region=lambda _: torch.no_grad())
    pool.__dict__.update(
        size=SIZE, page_size=16, head_num=2, head_dim=32, v_head_dim=32, layer_num=LAYERS,
        store_dtype=dtype, device="cpu", kv_cache_layout="nhd", use_hnd=False,
        memory_saver_adapter=saver, enable_custom_mem_pool=False, custom_mem_pool=None,
    )  # fmt: skip
    return pool


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_the_pool_has_upstreams_buffers_and_no_memory_yet(dtype: torch.dtype) -> None:
    expected, found = pool_of(dtype), pool_of(dtype)
    expected._create_buffers_normal()
    before = psutil.Process().memory_info().rss
    create_buffers(MHATokenToKVPool._create_buffers_normal, found)
    taken = psutil.Process().memory_info().rss - before
    whole = 2 * LAYERS * SIZE * 64 * dtype.itemsize
    assert taken < whole / 10
    for mine, theirs in zip(
        found.k_buffer + found.v_buffer, expected.k_buffer + expected.v_buffer, strict=True
    ):
        assert (mine.shape, mine.stride(), mine.dtype) == (
            theirs.shape, theirs.stride(), theirs.dtype,
        )  # fmt: skip
        assert not bool(mine.view(torch.uint8).any())
        assert psutil.Process().memory_info().rss - before < whole / 2, "reads allocate nothing"
        mine[5] = 1.0
        assert bool((mine[5].float() == 1).all())
    assert torch.zeros(3, dtype=dtype).float().sum() == 0, "torch's own elsewhere"


@pytest.mark.parametrize("shape", [(3,), (0, 4), (700, 1000)])
def test_any_size_is_zero_and_can_be_written(shape: tuple[int, ...]) -> None:
    found = mapped_zeros(shape, torch.float32)
    assert found.shape == shape
    assert not bool(found.any())
    found += 1
    assert bool((found == 1).all())
    again = found.clone()
    assert torch.equal(found.view(-1).contiguous().view(shape), again)
