"""Runs greedy acceptance in Triton's interpreter, in a process of its own: the interpreter must be
chosen before Triton is imported. Prints JSON: parity with the torch reference and with SGLang's
rule, outcomes known by hand, bytes allocated. The argument: how many steps.
"""

from __future__ import annotations

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dspark.benchmarks.greedy_shapes import Step, outputs, steps
from sglang_dspark.kernels.accept_greedy import (
    Emitted,
    accept_greedy_torch,
    accept_greedy_triton,
    parts_of,
    room_for,
)
from tests.kernels.greedy_reference import different
from tests.kernels.interpreter import patch_language_once

SLOTS, WIDTH = 16, 12


def parity(count: int) -> dict[str, Any]:
    """`count` steps, one room for all of them; what differs, and what of the rule was needed."""
    room = room_for(SLOTS, WIDTH, torch.device("cpu"))
    wrong, report = [], {"requests": 0, "kept": 0, "cut": 0, "parts": set[int]()}
    for number, given in enumerate(steps(count)):
        if len(wrong) > 9:  # a fault need not be shown in every step
            break
        out = outputs(len(given.rows), given.width)
        accept_greedy_triton(*given[:4], out, room)
        expected = accept_greedy_torch(*given)
        wrong += [f"step {number}, {name}" for name in different(out, expected)]
        wrong += [f"step {number}, SGLang's {name}" for name in unlike_upstream(given, out)]
        report["requests"] += len(out.accepted)
        report["kept"] += int(out.accepted.sum())
        report["cut"] += int((out.accepted < given.rows - 1).sum())
        report["parts"].add(parts_of(len(given.ids), given.logits.shape[1]))
    return {
        **report,
        "parts": sorted(report["parts"]),
        "wrong": wrong,
        "arrivals": int(room.arrivals.abs().sum()),
    }


def unlike_upstream(given: Step, out: Emitted) -> list[str]:
    """The same of SGLang's own functions, where they are defined: no empty slot, no NaN."""
    from sglang.kernels.ops.speculative.dspark import dspark_accept, dspark_verify_window

    requests, width = len(given.rows), given.width
    if bool((given.rows < 1).any()) or bool(given.logits.isnan().any()):
        return []
    verified = torch.arange(width) < given.rows[:, None]
    total = int(given.rows.sum())
    window = torch.zeros(requests, width, dtype=torch.int64)
    window[verified] = given.ids[:total]
    logits = given.logits.new_zeros(requests * width, given.logits.shape[1])
    logits[verified.flatten()] = given.logits[:total]
    accepted, bonus, dropped = dspark_accept.accept_greedy(
        candidates=window,
        target_logits=logits,
        verify_num_draft_tokens=width,
        cutoff_verify_lens=given.rows,
    )
    ended = dspark_accept.finalize_accept_lens(
        correct_len=accepted, cap_trim_lens=0 * dropped, prefix_lens=given.lens
    )
    tokens = dspark_verify_window.build_out_tokens(
        draft_tokens=window[:, 1:],
        correct_len=accepted,
        bonus=bonus,
        verify_num_draft_tokens=width,
        gamma=width - 1,
    )
    lens = (ended.cap_trim_lens, ended.commit_lens, ended.new_seq_lens)
    theirs = Emitted(accepted.long(), bonus, *lens, tokens)
    return different(out, theirs)


class Allocated(TorchDispatchMode):
    """Bytes of the tensors that are made."""

    bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and not any(made is each for each in args):
            self.bytes += made.numel() * made.element_size()
        return made


def known() -> dict[str, Any]:
    """Ties, NaN, an infinite logit, a row of -inf, an empty slot, a row behind the last request."""
    inf, nan = float("inf"), float("nan")
    logits = torch.tensor(
        [
            [[0.0, 2.0, 2.0], [nan, 1.0, 3.0], [-inf, -inf, -inf]],
            [[-0.0, 0.0, -1.0], [inf, 9.0, inf], [9.0, nan, nan]],
            [[5.0, 5.0, 6.0], [7.0, nan, nan], [7.0, 7.0, 7.0]],
        ]
    ).view(9, 3)[:7]
    ids = torch.tensor([9, 1, 2, 9, 0, 1, 2])
    given = ids, torch.tensor([3, 3, 0]), logits, torch.tensor([4, 50, 7])
    out = outputs(3, 3)
    room = room_for(3, 3, torch.device("cpu"))
    accept_greedy_triton(*given, out, room)
    with Allocated() as made:
        accept_greedy_triton(*given, out, room)
    return {**{name: getattr(out, name).tolist() for name in Emitted._fields}, "bytes": made.bytes}


if __name__ == "__main__":
    patch_language_once()
    print(json.dumps({"known": known(), "parity": parity(int(sys.argv[1]))}))
