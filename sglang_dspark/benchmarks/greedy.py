"""Time greedy acceptance on a CUDA device: `python -m sglang_dspark.benchmarks.greedy`.

`accept_greedy` on float32 logits next to SGLang's `AcceptGreedy`, `FinalizeAcceptLens` and
`BuildOutTokens`, as its graphs call them. Every draft is verified. Rows are those of
`timing.timed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from sglang_dspark.benchmarks.greedy_shapes import Step, outputs
from sglang_dspark.benchmarks.timing import Call, Candidate, print_rows
from sglang_dspark.kernels.accept_greedy import accept_greedy_triton, room_for

REQUESTS = (1, 16, 64, 256)
GAMMA, VOCAB = 7, 151_936


def candidates(
    requests: Sequence[int] = REQUESTS, device: str = "cuda", vocab: int = VOCAB
) -> Iterator[Candidate]:
    """Yield both implementations of every step."""
    for count in requests:
        case = step(count, GAMMA + 1, vocab, device)
        ways: dict[str, partial[Call]] = {
            "ours": partial(_ours, case),
            "SGLang AcceptGreedy, lens, tokens": partial(upstream, case),
        }
        for name, make in ways.items():
            yield Candidate("accept_greedy", (count, GAMMA, vocab), "", name, make)


def step(requests: int, width: int, vocab: int, device: str) -> Step:
    """Make a step on the device itself; three of four drafts are the target's choice."""
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn((requests, width, vocab), generator=generator, device=device)
    luck = torch.rand((requests, width), generator=generator, device=device)
    other = torch.randint(vocab, (requests, width), generator=generator, device=device)
    return Step(
        window=torch.where(luck < 0.75, logits.argmax(-1).roll(1, 1), other),
        rows=torch.full((requests,), width, dtype=torch.int64, device=device),
        logits=logits.view(-1, vocab),
        lens=torch.full((requests,), 1000, dtype=torch.int64, device=device),
    )


def _ours(case: Step) -> Call:
    requests, width = case.window.shape
    room = room_for(requests, width, case.logits.device)
    out = outputs(requests, width, str(case.logits.device))
    return lambda: accept_greedy_triton(*case, out, room)


def upstream(case: Step) -> Call:
    """SGLang's operators on the same step, without the copies that follow them."""
    module = import_module("sglang.kernels.ops.speculative.dspark.dspark_accept")
    window = import_module("sglang.kernels.ops.speculative.dspark.dspark_verify_window")
    width = case.window.shape[1]
    drafts = case.window[:, 1:].contiguous()

    def call() -> Tensor:
        accepted, bonus, dropped = module.AcceptGreedy.execute(
            candidates=case.window,
            target_logits=case.logits,
            verify_num_draft_tokens=width,
            cutoff_verify_lens=case.rows,
            fused_argmax=True,
        )
        module.FinalizeAcceptLens.execute(
            correct_len=accepted, cap_trim_lens=dropped, prefix_lens=case.lens
        )
        tokens: Tensor = window.BuildOutTokens.execute(
            draft_tokens=drafts,
            correct_len=accepted,
            bonus=bonus,
            verify_num_draft_tokens=width,
            gamma=width - 1,
        )
        return tokens

    return call


if __name__ == "__main__":
    print_rows(candidates)
