"""Time attention of verify windows on a CUDA device.

`python -m sglang_dspark.benchmarks.window_attention` times a layer of Qwen3-4B's shape in bfloat16
next to the extend kernel of SGLang's Triton backend. A graph has as many slots as tokens; slots
beyond the requests are empty. Rows are those of `timing.timed`, their shape is requests, rows of a
window, context.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from sglang_dspark.benchmarks.timing import Call, Candidate, print_rows
from sglang_dspark.benchmarks.window_shapes import Attention
from sglang_dspark.kernels.window_attention import attend_triton
from sglang_dspark.kernels.window_inputs import Context, Rule, Windows

REQUESTS = (64, 1, 8, 128)
ROWS = (8, 1)  # of a window: a step with all drafts, a step without
LONGEST = 8  # rows that a graph is captured for, gamma + 1
CONTEXTS = (256, 2048)
SIZES = (32, 8, 128)  # query heads, KV heads, width
PEER = "SGLang extend_attention_fwd"


def candidates(
    requests: Sequence[int] = REQUESTS,
    device: str = "cuda",
    sizes: tuple[int, int, int] = SIZES,
    contexts: Sequence[int] = CONTEXTS,
) -> Iterator[Candidate]:
    """Yield both implementations of every pass. sizes: query heads, KV heads, width."""
    for count in requests:
        for rows in ROWS:
            for context in contexts:
                make = partial(layer, count, rows, context, sizes, device)
                for name, call in (("ours", _ours), (PEER, _peer)):
                    shape = (count, rows, context)
                    yield Candidate("window_attention", shape, "", name, partial(call, make))


def layer(
    requests: int, rows: int, context: int, sizes: tuple[int, int, int], device: str
) -> Attention:
    """Make a layer's pass on the device: all windows and contexts have one length."""
    heads, kv_heads, size = sizes
    generator = torch.Generator(device).manual_seed(requests)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    slots = torch.arange(requests * rows + 1, device=device).clamp(max=requests)  # [slots + 1]
    tokens, cached = requests * rows, requests * context
    windows = Windows(
        random(tokens, heads, size),
        random(tokens, kv_heads, size),
        random(tokens, kv_heads, size),
        slots * rows,
        LONGEST,
    )
    places = 1 + torch.randperm(cached, generator=generator, device=device)
    pools = random(cached + 1, kv_heads, size), random(cached + 1, kv_heads, size)
    starts = (slots * context).to(torch.int32)
    return Attention(windows, Context(*pools, starts, places), Rule(size**-0.5))


def _ours(make: partial[Attention]) -> Call:
    made = make()
    out = made.output()
    return lambda: attend_triton(*made, out)


def _peer(make: partial[Attention]) -> Call:
    made = make()
    return upstream(made, made.output())


def upstream(made: Attention, out: Tensor) -> Call:
    """Prepare SGLang's kernel on the same pass, as `TritonAttnBackend` calls it."""
    module = import_module("sglang.kernels.ops.attention.extend_attention")
    windows, context, rule = made
    return lambda: module.extend_attention_fwd(
        windows.queries,
        windows.keys,
        windows.values,
        out,
        context.keys,
        context.values,
        windows.starts,
        context.starts,
        context.indices,
        None,
        rule.causal,
        None,
        windows.longest,
        context.key_scale,
        context.value_scale,
        rule.scale,
        logit_cap=rule.logit_cap,
        sliding_window_size=rule.sliding,
        sinks=rule.sinks,
    )


if __name__ == "__main__":
    print_rows(candidates)
