"""Make windows and contexts of odd shapes for `kernels.window_attention`, tests and benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_dspark.kernels.window_attention import attend_torch
from sglang_dspark.kernels.window_inputs import Context, Rule, Windows

# Query heads, KV heads, width of keys, of values.
HEADS = (
    *((1, 1, 16, 16), (3, 1, 64, 64), (4, 2, 80, 80), (8, 2, 128, 128), (6, 6, 96, 96)),
    *((9, 3, 64, 64), (16, 1, 128, 128), (2, 1, 256, 256), (71, 1, 64, 64), (4, 1, 192, 128)),
)
CASES = tuple(
    (given, cache)
    for given in (torch.float32, torch.bfloat16, torch.float16)
    for cache in (given, given, given, torch.float8_e4m3fn, torch.float8_e5m2)
)
MOST = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-3}  # of `difference`
UNWRITTEN = -77.0  # content of the output before


class Attention(NamedTuple):
    """Arguments of `attend_triton` without the output."""

    windows: Windows
    context: Context
    rule: Rule

    def output(self) -> Tensor:
        """Allocate an output [T, H, Dv] filled with `UNWRITTEN`."""
        rows, queries = self.windows.values, self.windows.queries
        return queries.new_full((*queries.shape[:2], rows.shape[-1]), UNWRITTEN)

    def expected(self) -> Tensor:
        """Return the reference's output."""
        out = self.output()
        attend_torch(*self, out)
        return out


def cases(count: int, seed: int = 0, device: str = "cpu") -> Iterator[Attention]:
    """Yield `count` cases: 1 to 6 slots, contexts of 0 to 300 tokens, windows of 0 to 8 rows."""
    generator = torch.Generator().manual_seed(seed)
    for turn in range(count):
        requests = 1 + int(torch.randint(6, (1,), generator=generator))
        longest = 1 + turn % 8
        lens = torch.randint((2, 40, 301)[turn % 3], (requests,), generator=generator)
        rows = torch.randint(longest + 1, (requests,), generator=generator)
        if turn % 4 == 1:  # a graph's padding makes a window longer than any that attends
            rows[-1] += 9
        given, cache = CASES[turn % len(CASES)]
        made = attention(
            generator, rows.tolist(), lens.tolist(), longest, HEADS[turn % len(HEADS)], given, cache
        )
        yield on(made._replace(rule=_rule(generator, made, turn)), device)


def attention(
    generator: torch.Generator,
    rows: list[int],
    lens: list[int],
    longest: int,
    heads: tuple[int, int, int, int],
    given: torch.dtype,
    cache: torch.dtype,
) -> Attention:
    """Make windows of `rows` rows after contexts of `lens` tokens.

    Slots of no token, slot 0 among them, contain NaN.
    """
    query_heads, kv_heads, size, value_size = heads
    tokens, cached = sum(rows), sum(lens)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    slots = 1 + torch.randperm(cached + 5, generator=generator)[:cached]

    def pool(width: int) -> Tensor:
        whole = torch.full((cached + 6, kv_heads, width), torch.nan)
        whole[slots] = random(cached, kv_heads, width)
        return whole.to(cache)

    # Queries, keys and values are views of one product's rows, as in a server.
    widths = (query_heads * size, kv_heads * size, kv_heads * value_size)
    queries, keys, values = random(tokens, sum(widths)).to(given).split(widths, -1)
    windows = Windows(
        queries.unflatten(-1, (query_heads, size)),
        keys.unflatten(-1, (kv_heads, size)),
        values.unflatten(-1, (kv_heads, value_size)),
        _starts(rows),
        longest,
    )
    # The page table of a graph is longer than its contexts.
    indices = torch.cat((slots, torch.full((3,), 10**9)))
    context = Context(pool(size), pool(value_size), _starts(lens).int(), indices)
    return Attention(windows, context, Rule(size**-0.5))


def on(made: Attention, device: str) -> Attention:
    """Return the case with all tensors on a device."""
    return Attention(
        replace(made.windows, **_moved(made.windows, device)),
        replace(made.context, **_moved(made.context, device)),
        replace(made.rule, **_moved(made.rule, device)),
    )


def difference(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative above one; infinite if only one number is NaN."""
    if not torch.equal(found.isnan(), expected.isnan()):
        return float("inf")
    off = (found.double() - expected.double()).nan_to_num().abs()
    off /= expected.double().nan_to_num().abs().clamp(min=1)
    return float(off.max()) if off.numel() else 0.0


def _rule(generator: torch.Generator, made: Attention, turn: int) -> Rule:
    """Vary the rule in every second case: a window, a cap, sinks, or both directions."""
    rule = made.rule
    if turn % 2:
        return rule
    heads = made.windows.queries.shape[1]
    return replace(
        rule,
        causal=turn % 3 != 1,
        sliding=(-1, 0, 3, 37)[turn // 2 % 4],
        logit_cap=(0.0, 5.0)[turn // 4 % 2],
        sinks=torch.randn(heads, generator=generator) if turn % 10 < 4 else None,
    )


def _starts(counts: list[int]) -> Tensor:
    return torch.tensor([0, *counts]).cumsum(0)


def _moved(record: Any, device: str) -> dict[str, Any]:
    return {k: v.to(device) for k, v in vars(record).items() if isinstance(v, Tensor)}
