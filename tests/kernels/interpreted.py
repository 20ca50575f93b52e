"""Runs the Triton admission in Triton's interpreter, in a process of its own: the interpreter must
be chosen before Triton is imported. Prints JSON: how many batches, and each that differs.
"""

from __future__ import annotations

import json
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch

from sglang_dspark.benchmarks.shapes import Batch, batches
from sglang_dspark.kernels.admission import admit_torch, admit_triton
from sglang_dspark.schedule.admission import admit
from sglang_dspark.schedule.budget import Workspace
from sglang_dspark.schedule.gains import gains


def on_the_host(case: Batch) -> torch.Tensor:
    """The same step by the compiled planner."""
    requests, gamma = case.confidence.shape
    weights = None if case.weights is None else case.weights.numpy()
    bounds = (None if b is None else b.long().numpy() for b in (case.limits, case.floors))
    limits, floors = bounds
    lengths = admit(
        gains(case.confidence.numpy(), weights),
        int(case.drafts),
        Workspace(requests, gamma),
        limits=limits,
        floors=floors,
    )
    return torch.from_numpy(lengths).int()


def main() -> None:
    """Compare all three on every batch of the shared generator."""
    different, count, mutants = [], 0, 0
    for case in batches("cpu"):
        count += 1
        found = admit_triton(*case)
        for name, other in (("torch", admit_torch(*case)), ("host", on_the_host(case))):
            if not torch.equal(found, other):
                different.append([name, *case.confidence.shape])
        mutants += not torch.equal(found, by_request_first(case))
    print(json.dumps({"batches": count, "different": different, "mutants": mutants}))


def by_request_first(case: Batch) -> torch.Tensor:
    """Mutant: equal survivals rank by request, then position. The batches must tell it apart."""
    from sglang_dspark.kernels.admission import keys_torch

    keys = keys_torch(*case[:1], *case[2:]).T  # [R, gamma]
    order = torch.argsort(keys.flatten(), descending=True, stable=True)
    chosen = order[: min(int(case.drafts), int((keys >= 0).sum()))] // keys.shape[1]
    return torch.bincount(chosen, minlength=len(keys)).int()


if __name__ == "__main__":
    main()
