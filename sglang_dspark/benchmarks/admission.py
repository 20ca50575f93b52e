"""Time admission on a CUDA device: `python -m sglang_dspark.benchmarks.admission`.

`admission` next to its torch reference and SGLang's operator
(sglang/kernels/ops/speculative/dspark/dspark_schedule.py), which reads confidences, has
no limits or weights, and needs another launch for indptr. Rows are those of `timing.timed`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from sglang_dspark.benchmarks.shapes import Batch, batch
from sglang_dspark.benchmarks.timing import Call, Candidate, print_rows
from sglang_dspark.kernels.admission import admit_torch, admit_triton

REQUESTS = (1, 16, 64, 256)
GAMMA = 7


def candidates(requests: Sequence[int] = REQUESTS, device: str = "cuda") -> Iterator[Candidate]:
    """Yield every implementation for every batch."""
    generator = np.random.default_rng(0)
    for count in requests:
        case = batch(generator, count, GAMMA, turn=0, device=device)
        ways: dict[str, partial[Call]] = {
            "ours": partial(_on, admit_triton, case),
            "torch sort": partial(_on, admit_torch, case),
            "SGLang ScheduleVerifyLensTopk": partial(upstream, case),
        }
        for name, make in ways.items():
            # A server launches it between two graphs.
            yield Candidate("admission", (count, GAMMA), "", name, make, eager=True)


def _on(operator: object, case: Batch) -> Call:
    return lambda: operator(*case)  # type: ignore[operator]


def upstream(case: Batch) -> Call:
    """Prepare SGLang's operator on confidences of the same logits, and the same K."""
    module = import_module("sglang.kernels.ops.speculative.dspark.dspark_schedule")
    planner = import_module("sglang.srt.speculative.dspark_components.dspark_planner")
    config = planner.DSparkScheduleConfig(gamma=case.logits.shape[1])

    def call() -> Tensor:
        lengths: Tensor = module.ScheduleVerifyLensTopk.execute(
            confidence=torch.sigmoid(case.logits.float()), budget=case.drafts, cfg=config
        )
        return lengths

    return call


if __name__ == "__main__":
    print_rows(candidates)
