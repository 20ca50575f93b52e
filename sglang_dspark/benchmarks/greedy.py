"""Times `accept_greedy` on a CUDA device against SGLang's operators: `python -m
sglang_dspark.benchmarks.greedy`. Without such a device it says so and measures nothing.

Prints one JSON row a shape: `{op, shape, ours_us, gb_s, peer, peer_us}`, medians of CUDA-event
times and the bytes of verified logits over ours. SGLang's (0.5.23) are `AcceptGreedy`,
`FinalizeAcceptLens` and `BuildOutTokens`, as its graphs call them; no graph on either side.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from sglang_dspark.benchmarks.admission import microseconds
from sglang_dspark.benchmarks.greedy_shapes import Step, outputs, step
from sglang_dspark.kernels.accept_greedy import accept_greedy_triton, room_for

SHAPES = ((1, 7), (16, 7), (64, 7), (256, 7))
VOCAB = 151_936


def rows() -> list[dict[str, object]]:
    """Times of all shapes on the current CUDA device."""
    generator = torch.Generator().manual_seed(0)
    found: list[dict[str, object]] = []
    for requests, gamma in SHAPES:
        case = step(generator, requests, gamma, VOCAB, turn=10, device="cuda")  # bfloat16
        room = room_for(requests, gamma + 1, case.logits.device)
        out = outputs(requests, gamma + 1, "cuda")

        def ours(case: Step = case, room: object = room, out: object = out) -> Tensor:
            accept_greedy_triton(*case, out, room)  # type: ignore[arg-type]
            return case.window

        median = microseconds(ours)
        read = int(case.rows.sum()) * VOCAB * case.logits.element_size()
        row = {"op": "accept_greedy", "shape": [requests, gamma, VOCAB], "ours_us": median}
        row |= {"gb_s": read / median / 1e3, "peer": "SGLang AcceptGreedy, lens, tokens"}
        try:
            found.append({**row, "peer_us": microseconds(upstream(case))})
        except Exception as error:
            found.append({**row, "peer_us": None, "reason": f"{type(error).__name__}: {error}"})
    return found


def upstream(case: Step) -> Callable[[], Tensor]:
    """SGLang's operators on the same step; the rest of the rule, which copies, is left out."""
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


def main() -> None:
    """Print the rows, or why there are none."""
    if not torch.cuda.is_available():
        print("no CUDA device here: this benchmark measures nothing on a CPU")
        return
    for row in rows():
        print(json.dumps(row))


if __name__ == "__main__":
    main()
