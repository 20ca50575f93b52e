"""Time the indexing of a ragged pass on a GPU: `python -m sglang_dspark.benchmarks.pass_rows`.

`pass_rows` next to its torch reference and SGLang's launches for the same pass: its rows
(sglang/kernels/ops/speculative/dspark/dspark_verify_window.py), and its windows padded twice to
the graph's slots and once more for attention. Rows are those of `timing.timed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from sglang_dspark.benchmarks.timing import Call, Candidate, print_rows
from sglang_dspark.kernels.pass_rows import rows_torch, rows_triton

REQUESTS = (1, 16, 64, 256)
GAMMA, CONTEXT = 7, 512


class Pass(NamedTuple):
    """Arguments of `kernels.pass_rows`."""

    indptr: Tensor
    ids: Tensor
    lens: Tensor
    owners: Tensor
    table: Tensor
    tokens: int
    slots: int


def candidates(requests: Sequence[int] = REQUESTS, device: str = "cuda") -> Iterator[Candidate]:
    """Yield every implementation for passes of these requests, in graphs of as many slots."""
    for count in requests:
        given = whole_windows(count, device)
        ways: dict[str, partial[Call]] = {
            "ours": partial(_on, rows_triton, given),
            "torch": partial(_on, rows_torch, given),
            "SGLang's launches": partial(upstream, given),
        }
        for name, make in ways.items():
            # A server launches it before the pass's graph.
            yield Candidate("pass_rows", (count, GAMMA), "", name, make, eager=True)


def whole_windows(requests: int, device: str) -> Pass:
    """Return a pass in which every request verifies gamma drafts."""
    width = GAMMA + 1
    indptr = torch.arange(requests + 1, dtype=torch.int32, device=device) * width
    owners = torch.arange(1, requests + 1, device=device)
    table = torch.arange((requests + 1) * 2 * CONTEXT, dtype=torch.int32, device=device)
    return Pass(
        indptr,
        torch.ones(requests, width, dtype=torch.int64, device=device),
        torch.full((requests,), CONTEXT, device=device),
        owners,
        table.view(requests + 1, 2 * CONTEXT),
        requests * width,
        requests,
    )


def _on(operator: object, given: Pass) -> Call:
    return lambda: operator(*given)  # type: ignore[operator]


def upstream(given: Pass) -> Call:
    """Prepare SGLang's launches on the same pass."""
    window = import_module("sglang.kernels.ops.speculative.dspark.dspark_verify_window")
    layouts = import_module("sglang.srt.speculative.ragged_verify")
    pool = SimpleNamespace(req_to_token=given.table)
    batch = SimpleNamespace(seq_lens=given.lens, req_pool_indices=given.owners)
    layout = layouts.RaggedVerifyLayout.from_verify_lens_device(
        verify_lens=given.indptr.diff(), graph_num_tokens=given.tokens
    )
    drafts = given.ids[:, 1:].contiguous()

    def call() -> None:
        window.BuildRaggedVerifyWindow.execute(
            batch=batch,
            layout=layout,
            draft_block_ids=drafts,
            draft_tokens=drafts,
            bs=len(given.ids),
            device=given.ids.device,
            verify_num_draft_tokens=GAMMA + 1,
            model_runner=SimpleNamespace(req_to_token_pool=pool),
        )
        for cap in (GAMMA + 1, None, GAMMA + 1):
            layout.padded_to_bucket(padded_bs=given.slots, cap=cap)

    return call


if __name__ == "__main__":
    print_rows(candidates)
