"""Upstream's epilogue of a verify graph with our accept rule in Triton's interpreter, and without;
in a process of its own, as the interpreter is chosen before Triton is imported. Prints JSON.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.speculative.dspark_components.dspark_verify import DsparkVerifyEpilogue
from sglang.srt.speculative.spec_tp_sync import SpecTpSync, SpecTpSyncSite
from torch import Tensor

from sglang_dspark.backends.cuda import accept_in_graph
from tests.kernels.interpreter import patch_language_once

SEATS, GAMMA, VOCAB = 8, 5, 23
OUTS = ("correct_len", "bonus", "commit_lens", "new_seq_lens", "cap_trim_lens")


def epilogue() -> Any:
    """Of a server with one rank."""
    alone = SpecTpSync(SimpleNamespace(world_size=1, rank_in_group=0))
    return DsparkVerifyEpilogue(
        max_bs=SEATS, verify_num_draft_tokens=GAMMA + 1, device="cpu", tp_sync=alone
    )


def replay(made: Any, seed: int, seats: int) -> dict[str, list[Any]]:
    """A pass of `seats` requests through the epilogue; what its buffers hold then.

    Drafts are the target's choice two times of three; none is token 0, which the choice of the
    zeros behind a request's rows is.
    """
    generator = torch.Generator().manual_seed(seed)
    lens = torch.randint(1, GAMMA + 2, (seats,), generator=generator)
    logits = torch.randn(int(lens.sum()), VOCAB, generator=generator)
    logits[:, 0] = -5.0
    ids = logits.argmax(-1).roll(1)
    luck = torch.rand(len(ids), generator=generator)
    ids = torch.where(luck < 0.67, ids, 1 + ids % (VOCAB - 1))
    made.begin_step(lens, armed=False)
    drafts = torch.zeros(seats, GAMMA + 1, dtype=torch.int64)
    drafts[torch.arange(GAMMA + 1) < lens[:, None]] = ids
    made.draft_tokens_buf[: seats * GAMMA] = drafts[:, 1:].flatten()
    made(
        compact_logits=logits,
        compact_hidden=torch.randn(len(ids), 4, generator=generator),
        input_ids=ids,
        seq_lens=torch.randint(1, 99, (seats,), generator=generator),
        req_pool_indices=torch.arange(seats),
        bs=seats,
    )
    outs = made.read_accept(seats)
    kept = torch.arange(GAMMA + 1) < outs.commit_lens[:, None]
    found = {name: getattr(outs, name).tolist() for name in OUTS}
    return {**found, "tokens": torch.where(kept, outs.out_tokens, 0).tolist()}


def ours(made: Any, **given: Tensor) -> Tensor:
    """In place of the method."""
    return accept_in_graph.accept(UPSTREAM, made, **given)


UPSTREAM = DsparkVerifyEpilogue._accept


def main() -> None:
    """What differs, how often the operator ran, and what is said where it does not."""
    different, kept = [], 0
    mine, theirs = epilogue(), epilogue()
    launch = mock.patch.object(
        accept_in_graph, "accept_greedy_triton", wraps=accept_in_graph.accept_greedy_triton
    )
    with launch as launched:
        for seed in range(40):
            seats = 1 + seed % SEATS
            expected = replay(theirs, seed, seats)
            with mock.patch.object(DsparkVerifyEpilogue, "_accept", ours):
                found = replay(mine, seed, seats)
            kept += sum(found["correct_len"])
            different += [f"{seed} {name}" for name in found if found[name] != expected[name]]
        ran = launched.call_count
        told = [refused(simulated_correct_len=torch.ones(1, dtype=torch.int64))]
        told.append(refused(_tp_sync=_Ranks()))
        told.append(refused(block_accept_lens_buf=torch.zeros(SEATS, dtype=torch.int32)))
        by_upstream = launched.call_count == ran
    report = {"different": different, "ran": ran, "kept": kept, "told": told}
    print(json.dumps({**report, "by_upstream": by_upstream}))


class _Ranks:
    """Of several ranks, each told that it is the leader."""

    def enabled(self, site: Any) -> bool:
        return bool(site is SpecTpSyncSite.DSPARK_ACCEPT_GRAPH)

    def sync(self, site: Any, values: Tensor) -> Tensor:
        return values


def refused(**changed: Any) -> list[str]:
    """What is said where upstream does something in between; twice, to be said once."""
    made = epilogue()
    for name, value in changed.items():
        setattr(made, name, value)
    with (
        mock.patch.object(DsparkVerifyEpilogue, "_accept", ours),
        mock.patch.object(accept_in_graph.logger, "warning") as warning,
    ):
        replay(made, 1, 2)
        replay(made, 2, 3)
    return [call.args[0] % call.args[1:] for call in warning.call_args_list]


if __name__ == "__main__":
    patch_language_once()
    torch.cuda.is_current_stream_capturing = lambda: False  # raises where there is no CUDA
    main()
