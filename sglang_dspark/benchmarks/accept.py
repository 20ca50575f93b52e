"""Times `accept_sampled` and `accept_block` on a CUDA device against SGLang's accept operator:
`python -m sglang_dspark.benchmarks.accept`. Without such a device it says so and measures nothing.

Prints one JSON row a shape and cut: `{op, shape, cut, ours_us, ours_bytes, block_us, block_bytes,
peer, peer_us, peer_bytes}`, `block` the rule for whole windows, medians of CUDA-event times and the
most memory in use beside the arguments. SGLang's operator
(sglang/kernels/ops/speculative/dspark/dspark_accept.py, 0.5.23) is looked up by name; its
cuts are one after the other, normalised in between, so the two do the same work but not always
the same law. Where it is not installed or refuses a shape the row has the reason and no time.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sglang_dspark.benchmarks.accept_shapes import step
from sglang_dspark.benchmarks.admission import microseconds
from sglang_dspark.kernels.accept_block import accept_block_triton
from sglang_dspark.kernels.accept_sampled import accept_triton
from sglang_dspark.kernels.accept_windows import Windows

SHAPES = ((1, 7), (16, 7), (64, 7), (256, 7))
VOCAB = 151_936
CUTS: dict[str, dict[str, Any]] = {"none": {}, "top-k": {"top_k": 50}, "top-p": {"top_p": 0.9}}
Call = Callable[[], Tensor]


def rows() -> list[dict[str, object]]:
    """Times of all shapes on the current CUDA device."""
    generator = torch.Generator().manual_seed(0)
    arrivals = torch.zeros(max(requests for requests, _ in SHAPES), dtype=torch.int32).cuda()
    found: list[dict[str, object]] = []
    for requests, gamma in SHAPES:
        # turn 0: no ties, greedy requests, seeds or cuts, logits that were drafted from.
        plain = step(generator, requests, gamma, VOCAB, turn=0, device="cuda")
        for cut, settings in CUTS.items():
            given = cut_by(plain, **settings)
            ours = measured(lambda given=given: accept_triton(given, arrivals).bonus)  # type: ignore[misc]
            block = measured(lambda given=given: accept_block_triton(given, arrivals).bonus)  # type: ignore[misc]
            try:
                theirs = measured(upstream(given))
            except Exception as error:
                theirs = {"us": None, "reason": f"{type(error).__name__}: {error}"}
            found.append(
                {"op": "accept", "shape": [requests, gamma, VOCAB], "cut": cut}
                | {f"ours_{name}": value for name, value in ours.items()}
                | {f"block_{name}": value for name, value in block.items()}
                | {"peer": "SGLang AcceptSampling"}
                | {f"peer_{name}": value for name, value in theirs.items()}
            )
    return found


def cut_by(given: Windows, top_k: int | None = None, top_p: float | None = None) -> Windows:
    """The same step, every request of it with these cuts."""
    like = given.temperatures
    return replace(
        given,
        top_k=None if top_k is None else torch.full_like(like, top_k).int(),
        top_p=None if top_p is None else torch.full_like(like, top_p),
    )


def measured(call: Call) -> dict[str, object]:
    """Median time, and bytes at the peak that were not in use before."""
    median = microseconds(call)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return {"us": median, "bytes": torch.cuda.max_memory_allocated() - before}


def upstream(given: Windows) -> Call:
    """SGLang's operator, its draft probabilities included, as its verify step calls it."""
    module = import_module("sglang.kernels.ops.speculative.dspark.dspark_accept")
    requests, gamma = given.drafts.shape
    draft, temperatures = given.draft_logits, given.draft_temperatures
    if draft is None or temperatures is None:
        raise ValueError("has no draft of an argmax here")
    info = SimpleNamespace(
        temperatures=given.temperatures[:, None],
        top_ks=given.top_k,
        top_ps=given.top_p,
        need_top_k_sampling=given.top_k is not None,
        need_top_p_sampling=given.top_p is not None,
    )
    anchors = torch.zeros_like(given.drafts[:, :1])
    candidates = torch.cat([anchors, given.drafts], dim=1)
    top_k = None if given.top_k is None else int(given.top_k.max())
    limits = SimpleNamespace(max_top_k=top_k, uniform_top_k_value=top_k)

    def call() -> Tensor:
        probs = module.SoftmaxTemp.execute(
            logits=draft.view(requests * gamma, -1),
            temperatures=temperatures[:, None],
            rows_per_request=gamma,
        )
        done = module.AcceptSampling.execute(
            candidates=candidates,
            target_logits=given.logits,
            draft_probs=probs.view(requests, gamma, -1),
            sampling_info=info,
            draft_input=limits,
            gamma=gamma,
            verify_num_draft_tokens=gamma + 1,
            cutoff_verify_lens=given.lengths + 1,
        )
        return done[1]

    return call


def main() -> None:
    """Print the rows, or why there are none."""
    if not torch.cuda.is_available():
        print("no CUDA device here: this benchmark measures nothing on a CPU")
        return
    for row in rows():
        print(json.dumps(row))


if __name__ == "__main__":
    main()
