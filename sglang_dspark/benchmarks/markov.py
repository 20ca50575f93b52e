"""Time the vanilla sequential head on a CUDA device: `python -m sglang_dspark.benchmarks.markov`.

`markov_sample` next to SGLang's block (sglang/srt/speculative/dspark_components/dspark_draft.py),
which launches a product, a step and its end for each position. Both save the steps'
logits, as the graph of a server's draft does for greedy and sampled requests; base logits and
weights are bfloat16, as there. Rows are those of `timing.timed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from sglang_dspark.benchmarks.timing import Call, Candidate, print_rows
from sglang_dspark.kernels.markov_blocks import Blocks, Noise
from sglang_dspark.kernels.markov_sample import markov_triton

REQUESTS = (1, 16, 64)
GAMMA, VOCAB, RANK = 7, 151_936, 256
TEMPERATURES = {"greedy": 0.0, "sampled": 0.7}


def candidates(
    requests: Sequence[int] = REQUESTS, device: str = "cuda", vocab: int = VOCAB
) -> Iterator[Candidate]:
    """Yield both implementations of every batch."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    w1, w2 = normal(vocab, RANK), normal(vocab, RANK)
    for count in requests:
        base = normal(count, GAMMA, vocab)
        for case, temperature in TEMPERATURES.items():
            given = Blocks(
                base,
                torch.zeros(count, dtype=torch.int64, device=device),
                w1,
                w2,
                temperatures=torch.full((count,), temperature, device=device),
                noise=Noise(1 << 40, torch.zeros(1, dtype=torch.int64, device=device)),
                logits=torch.empty_like(base),
            )
            ways: dict[str, partial[Call]] = {
                "ours": partial(_ours, given),
                "SGLang draft_markov_block": partial(upstream, given),
            }
            for name, make in ways.items():
                shape = (count, GAMMA, vocab, RANK)
                yield Candidate("markov", shape, f"{case}, logits kept", name, make)


def _ours(given: Blocks) -> Call:
    requests, gamma = given.base.shape[:2]
    scratch = torch.zeros(1 + requests * gamma, dtype=torch.int64, device=given.base.device)
    return lambda: markov_triton(given, scratch).tokens


def upstream(given: Blocks) -> Call:
    """Prepare SGLang's steps with its own vanilla head, as in the tail of its draft's graph."""
    drafts = import_module("sglang.srt.speculative.dspark_components.dspark_draft")
    models = import_module("sglang.srt.models.dspark")
    if given.noise is None or given.temperatures is None:
        raise ValueError("keeps logits only beside temperatures and noise")
    vocab, rank = given.w1.shape
    with torch.device("meta"):
        head = models.VanillaMarkov(vocab_size=vocab, markov_rank=rank)
    head.markov_w1.weight = torch.nn.Parameter(given.w1, requires_grad=False)
    head.markov_w2.weight = torch.nn.Parameter(given.w2, requires_grad=False)
    noise = drafts.DraftNoise(key=given.noise.key, offset=given.noise.offset)

    def call() -> Tensor:
        tokens: Tensor = drafts.draft_markov_block(
            markov_head=head,
            base_logits=given.base,
            anchor_tokens=given.anchors,
            draft_hidden=None,
            step_temperatures=given.temperatures,
            noise=noise,
            tp_sync=_OneRank(),
            logits_out=given.logits,
            greedy_draft=False,
        )[0]
        return tokens

    return call


class _OneRank:
    """SGLang's `SpecTpSync` of a single rank."""

    def sync(self, site: object, values: Tensor) -> Tensor:
        return values


if __name__ == "__main__":
    print_rows(candidates)
