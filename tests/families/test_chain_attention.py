"""Projections of the one-layer drafters: their own rotation, of queries and keys alike."""

from __future__ import annotations

from typing import Any

import torch

from sglang_dspark.drafter.attention import rope
from tests.families.helpers import WIDTH, random_drafter


def test_queries_and_keys_are_rotated_and_values_are_not() -> None:
    attention: Any = random_drafter("eagle3", 128).self_attn
    heads = attention.c.num_heads, attention.c.num_kv_heads
    x, at = torch.randn(3, 1, 2 * WIDTH), torch.arange(3)[:, None] + 5
    with torch.no_grad():
        query, key, value = attention.queries_keys_values(x, at)
        for found, layer, count in zip((query, key), ("q_proj", "k_proj"), heads, strict=True):
            plain = getattr(attention, layer)(x).view(3, 1, count, attention.c.head_dim)
            torch.testing.assert_close(found, rope(plain, at, attention.c.rope_theta))
        context = attention.keys_values(x, at)
        torch.testing.assert_close((key, value), context)
        assert torch.equal(value.flatten(-2), attention.v_proj(x))
