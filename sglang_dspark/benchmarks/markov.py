"""Times `markov_sample` on a CUDA device against SGLang's draft steps: `python -m
sglang_dspark.benchmarks.markov`. Without such a device it says so and measures nothing.

Prints one JSON row a shape and way: `{op, shape, way, ours_us, ours_bytes, peer, peer_us,
peer_bytes}`, medians of CUDA-event times and the most memory in use beside the arguments. SGLang's
block (sglang/srt/speculative/dspark_components/dspark_draft.py, 0.5.23) is looked up by name; it
launches a product, a step and its end for each position, or for one greedy request two kernels. By
default a server replays them in a graph, which spares it launches that are counted here: `graph`
times both so. Where it is not installed or refuses a shape the row has the reason and no time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module

import torch
from torch import Tensor

from sglang_dspark.benchmarks.accept import measured
from sglang_dspark.kernels.markov_blocks import Blocks, Noise
from sglang_dspark.kernels.markov_sample import markov_triton

SHAPES = ((1, 7), (4, 7), (16, 7), (64, 7))
VOCAB, RANK = 151_936, 256
KEPT = "greedy, logits kept"  # what a server's graph drafts for greedy requests
WAYS = ("greedy", "sampled", KEPT)
Call = Callable[[], Tensor]


def rows() -> list[dict[str, object]]:
    """Times of all shapes on the current CUDA device."""
    generator = torch.Generator("cuda").manual_seed(0)
    found: list[dict[str, object]] = []
    w1, w2 = (_normal(generator, (VOCAB, RANK)) for _ in range(2))
    for requests, gamma in SHAPES:
        base = _normal(generator, (requests, gamma, VOCAB))
        anchors = torch.zeros(requests, dtype=torch.int64, device="cuda")
        for way in WAYS:
            given = Blocks(base, anchors, w1, w2)
            if way != "greedy":
                offset = torch.zeros(1, dtype=torch.int64, device="cuda")
                warm = torch.full((requests,), 0.0 if way == KEPT else 0.7, device="cuda")
                given = replace(
                    given,
                    temperatures=warm,
                    noise=Noise(1 << 40, offset),
                    logits=torch.empty_like(base),
                )
            found += [_row(given, way, graph) for graph in (False, True)]
    return found


def _normal(generator: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def _row(given: Blocks, way: str, graph: bool) -> dict[str, object]:
    requests, gamma, width = given.base.shape
    scratch = torch.zeros(1 + requests * gamma, dtype=torch.int64, device="cuda")
    around = captured if graph else (lambda call: call)
    ours = measured(around(lambda: markov_triton(given, scratch).tokens))
    try:
        theirs = measured(around(upstream(given)))
    except Exception as error:
        theirs = {"us": None, "reason": f"{type(error).__name__}: {error}"}
    return (
        {"op": "markov", "shape": [requests, gamma, width, RANK], "way": way, "graph": graph}
        | {f"ours_{name}": value for name, value in ours.items()}
        | {"peer": "SGLang draft_markov_block"}
        | {f"peer_{name}": value for name, value in theirs.items()}
    )


def captured(call: Call) -> Call:
    """Replays of the call from a graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = call()

    def replay() -> Tensor:
        graph.replay()
        return kept

    return replay


def upstream(given: Blocks) -> Call:
    """SGLang's steps by its own vanilla head, as the tail of its draft's graph runs them."""
    drafts = import_module("sglang.srt.speculative.dspark_components.dspark_draft")
    models = import_module("sglang.srt.models.dspark")
    vocab, rank = given.w1.shape
    with torch.device("meta"):
        head = models.VanillaMarkov(vocab_size=vocab, markov_rank=rank)
    head.markov_w1.weight = torch.nn.Parameter(given.w1, requires_grad=False)
    head.markov_w2.weight = torch.nn.Parameter(given.w2, requires_grad=False)
    requests = len(given.base)
    greedy = given.temperatures is None
    warm = torch.zeros(requests, device=given.base.device) if greedy else given.temperatures
    key, offset = 0, torch.zeros(1, dtype=torch.int64, device=given.base.device)
    if given.noise is not None:
        key, offset = given.noise.key, given.noise.offset

    def call() -> Tensor:
        tokens, _ = drafts.draft_markov_block(
            markov_head=head,
            base_logits=given.base,
            anchor_tokens=given.anchors,
            draft_hidden=None,
            step_temperatures=warm,
            noise=drafts.DraftNoise(key=key, offset=offset),
            tp_sync=_Alone(),
            logits_out=given.logits,
            greedy_draft=greedy,
        )
        return tokens

    return call


class _Alone:
    """The one rank of SGLang's `SpecTpSync`, which nobody has to agree with."""

    def sync(self, site: object, values: Tensor) -> Tensor:
        return values


def main() -> None:
    """Print the rows, or why there are none."""
    if not torch.cuda.is_available():
        print("no CUDA device here: this benchmark measures nothing on a CPU")
        return
    for row in rows():
        print(json.dumps(row))


if __name__ == "__main__":
    main()
