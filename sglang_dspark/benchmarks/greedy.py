"""Time greedy acceptance on a CUDA device: `python -m sglang_dspark.benchmarks.greedy`.

`accept_greedy` on packed float32 logits next to SGLang's operators, as its graphs call them: the
scatter to windows of all slots, then `AcceptGreedy`, `FinalizeAcceptLens` and `BuildOutTokens`.
SHARE of the drafts are verified. Rows are those of `timing.timed`.
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
SHARE = 0.4  # of the drafts, verified


def candidates(
    requests: Sequence[int] = REQUESTS, device: str = "cuda", vocab: int = VOCAB
) -> Iterator[Candidate]:
    """Yield both implementations of every step."""
    for count in requests:
        case = step(count, GAMMA + 1, vocab, device)
        ways: dict[str, partial[Call]] = {
            "ours": partial(_ours, case),
            "SGLang scatter, AcceptGreedy, lens, tokens": partial(upstream, case),
        }
        for name, make in ways.items():
            yield Candidate("accept_greedy", (count, GAMMA, vocab), "", name, make)


def step(requests: int, width: int, vocab: int, device: str) -> Step:
    """Make a step on the device; three of four drafts are the target's choice."""
    generator = torch.Generator(device).manual_seed(0)
    verified = 1 + torch.arange(requests, device=device) % (2 * round(SHARE * (width - 1)) + 1)
    rows = verified.clamp(max=width)
    total = int(rows.sum())
    logits = torch.randn((total, vocab), generator=generator, device=device)
    luck = torch.rand((total,), generator=generator, device=device)
    other = torch.randint(vocab, (total,), generator=generator, device=device)
    return Step(
        ids=torch.where(luck < 0.75, logits.argmax(-1).roll(1), other),
        rows=rows,
        logits=logits,
        lens=torch.full((requests,), 1000, dtype=torch.int64, device=device),
        width=width,
    )


def _ours(case: Step) -> Call:
    requests = len(case.rows)
    room = room_for(requests, case.width, case.logits.device)
    out = outputs(requests, case.width, str(case.logits.device))
    return lambda: accept_greedy_triton(*case[:4], out, room)


def upstream(case: Step) -> Call:
    """Prepare SGLang's operators on the same step, without the copies that follow them."""
    module = import_module("sglang.kernels.ops.speculative.dspark.dspark_accept")
    windows = import_module("sglang.kernels.ops.speculative.dspark.dspark_verify_window")
    width, requests = case.width, len(case.rows)
    logits = case.logits.new_empty(requests * width, case.logits.shape[1])
    ids = case.ids.new_empty(requests * width, 1)
    drafts = case.ids.new_zeros(requests, width - 1)

    def call() -> Tensor:
        for compact, out in ((case.logits, logits), (case.ids.view(-1, 1), ids)):
            windows.scatter_compact_to_strided_into(
                compact=compact, verify_lens=case.rows, out=out, stride=width, fill_value=0
            )
        accepted, bonus, dropped = module.AcceptGreedy.execute(
            candidates=ids.view(requests, width),
            target_logits=logits,
            verify_num_draft_tokens=width,
            cutoff_verify_lens=case.rows,
            fused_argmax=True,
        )
        module.FinalizeAcceptLens.execute(
            correct_len=accepted, cap_trim_lens=dropped, prefix_lens=case.lens
        )
        tokens: Tensor = windows.BuildOutTokens.execute(
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
